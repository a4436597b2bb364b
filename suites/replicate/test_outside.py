"""Weights that are read outside their unit, where modules are sharded or replicated in place."""

import pytest

from lockstep.conformance.models.readers import (
    AFTER,
    BEFORE,
    before_its_unit,
    checkpointed,
    decay_term,
    tied_head,
    tied_head_by_method,
)

pytestmark = pytest.mark.ranks(2)


def refused(text=r"parameter 'wte.weight' of .*Embedding.* is read by"):
    return pytest.raises(RuntimeError, match=text)


# Groups of neighbours live as long as the model, and no longer than the world.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("read", AFTER + BEFORE)
def test_what_neighbours_hold_between_them_is_refused(check_reads, fully_shard, read):
    with refused():
        check_reads(fully_shard, read, reshard_after_forward=2)


@pytest.mark.ranks(1, 2, 4)
def test_a_registered_method_has_the_weight_of_its_unit(check_reads, front, run_subtests):
    def register(model):
        front.engine.composable.register_fsdp_forward_method(model.wte, "attend")

    settings = {"no_sync": [False, True], "prepare": [register]}
    run_subtests(settings, check_reads, front=front, read=tied_head_by_method)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", [before_its_unit, tied_head, decay_term, checkpointed])
def test_what_the_user_unshards_may_be_read_before_its_unit(check_reads, front, run_subtests, read):
    """`before_its_unit` also shows that the gradient of the first read is not lost."""

    def unshard(model):
        model.wte.unshard()
        if front.shards:
            model.wte.set_reshard_after_forward(False)

    settings = {"no_sync": [False, True], "prepare": [unshard]}
    run_subtests(settings, check_reads, front=front, read=read)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("read", AFTER)
def test_a_setter_keeps_the_weight_for_later_readers(check_reads, fully_shard, read):
    check_reads(fully_shard, read, prepare=lambda model: model.set_reshard_after_forward(False))
