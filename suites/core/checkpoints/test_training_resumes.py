"""Training that resumes from state dicts of each type, also at other world sizes, units and strategies."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from lockstep.assertions import assert_named_close
from lockstep.assertions.closeness import EXACT
from lockstep.conformance import Capability, require
from lockstep.conformance.models import UnevenShapes

pytestmark = pytest.mark.ranks(1, 2, 3)

KINDS = ["FULL", "SHARDED", "LOCAL"]
OTHER = {"units": ("body.linear",), "strategy": "SHARD_GRAD_OP"}
adamw = partial(torch.optim.AdamW, lr=0.01)


@pytest.mark.parametrize(
    ("use_orig_params", "strategy", "kind"),  # in pairs: each value of one with each of the others
    [
        *((False, "FULL_SHARD", "FULL"), (True, "FULL_SHARD", "SHARDED"), (True, "FULL_SHARD", "LOCAL")),
        *((True, "NO_SHARD", "FULL"), (False, "NO_SHARD", "SHARDED"), (False, "NO_SHARD", "LOCAL")),
    ],
)
def test_uneven_and_empty_shards_resume_with_the_same_bits(train, states, use_orig_params, strategy, kind):
    """torchtitan#1136: the loss was another one."""
    spec = {"use_orig_params": use_orig_params, "strategy": strategy, "apart": 1}
    trained, resumed = train(2, **spec), train(3, **spec)
    saved = copy.deepcopy(states.all(*trained.both, kind)) if kind != "LOCAL" else None
    states.load_all(*resumed.both, saved or states.all(*trained.both, kind), kind)
    for number in (2, 3):
        assert_named_close(states.values(*resumed.both), states.values(*trained.both), EXACT)
        for each in (trained, resumed):
            each.step(number)
    assert_named_close(states.values(*resumed.both), states.values(*trained.both), EXACT)


@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@pytest.mark.parametrize("first", [False, True], ids=["from_flat", "from_original"])
def test_state_goes_to_other_units_and_back(train, states, kind, first):
    one = train(1, use_orig_params=first)
    other = train(2, use_orig_params=not first, units=("body.linear",), strategy="NO_SHARD")
    expected = states.values(*one.both)
    states.load_all(*other.both, states.all(*one.both, kind), kind)
    assert_named_close(states.values(*other.both), expected, EXACT)
    saved = states.all(*other.both, kind)
    one.step(1)
    states.load_all(*one.both, saved, kind)
    assert_named_close(states.values(*one.both), expected, EXACT)


def test_state_of_rank_zero_alone_loads_on_all(world, train, states, use_orig_params):
    saving = train(1, use_orig_params=use_orig_params)
    loading = train(2, use_orig_params=use_orig_params)
    state = states.all(*saving.both, rank0=True)
    assert [bool(part) for part in state.values()] == [world.rank == 0] * 2
    expected = states.values(*saving.both)
    states.load_optimizer(*loading.both, state["optimizer"], rank0=True)
    found = states.values(*loading.both)
    assert_named_close(
        {name: found[name] for name in found if " " in name},
        {name: expected[name] for name in expected if " " in name},
        EXACT,
    )


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
def test_ranks_may_give_the_optimizer_parameters_in_other_orders(world, train, states, kind):
    """pytorch's test_fsdp_optim_state.py reverses them on odd ranks."""

    def make(parameters):
        return adamw(list(parameters)[:: -1 if world.rank % 2 else 1])

    trained, plain = (train(1, use_orig_params=True, make=each) for each in (make, adamw))
    expected = states.values(*plain.both)
    resumed = train(2, use_orig_params=True, make=make)
    states.load_all(*resumed.both, states.all(*trained.both, kind), kind)
    assert_named_close(states.values(*resumed.both), expected, EXACT)


@pytest.mark.ranks(2)
def test_modules_of_activation_checkpointing_are_left_out_of_names(train, states, use_orig_params):
    """They save the module in them under its own name, and optimizers with or without them exchange state."""

    def checkpointed():
        bare = UnevenShapes()
        apply_activation_checkpointing(bare, check_fn=lambda module: isinstance(module, nn.Linear))
        return bare

    spec = {"units": (), "use_orig_params": use_orig_params}
    trained, plain = train(1, bare=checkpointed, **spec), train(1, **spec)
    expected = states.values(*plain.both)
    assert any("_checkpoint_wrapped_module" in name for name, _ in trained.model.named_modules())
    assert_named_close(states.values(*trained.both), expected, EXACT)
    plain.step(1)
    states.load_all(*plain.both, states.all(*trained.both))
    assert_named_close(states.values(*plain.both), expected, EXACT)


@pytest.fixture
def groups(world, engine):
    """Process groups of the first rank, the first two and all three, by size."""
    # On all ranks, also those that have no part in what is sharded.
    require(engine, Capability.STATE_DICTS, Capability.SCALARS)
    made = {size: dist.new_group(range(size)) for size in (1, 2, 3)}
    yield made
    world.barrier()
    for size, group in made.items():
        if world.rank < size:
            dist.destroy_process_group(group)


def through_files(world, states, saving, make):
    """Save and load sharded state with torch's checkpoint, on the ranks that have a model."""
    path = world.shared_tmp_path / "checkpoint"
    if saving:
        dcp.save(states.all(*saving.both, "SHARDED"), checkpoint_id=path, process_group=saving.group)
    world.barrier()
    loading = make()
    if loading:
        state = states.all(*loading.both, "SHARDED")
        dcp.load(state, checkpoint_id=path, process_group=loading.group)
        states.load_all(*loading.both, state, "SHARDED")
    return loading


def through_dict(world, states, saving, make):
    """Pass the full state of rank 0 to all ranks that have a model."""
    state = world.gather(saving and states.all(*saving.both))[0]
    loading = make()
    if loading:
        states.load_all(*loading.both, state)
    return loading


def check_resumed(world, states, saving, loading, tolerance=EXACT):
    """Check that both have the same values, to the bit now, and after another step."""
    for number in (2, None):
        mine = [each and states.values(*each.both) for each in (saving, loading)]
        found = world.gather(mine)
        for _, values in found:
            if values:
                assert_named_close(values, found[0][0], EXACT if number else tolerance)
        for each in (saving, loading):
            if each and number:
                each.step(number)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("size", "carry", "use_orig_params"),  # in pairs
    [
        *((1, through_files, False), (2, through_files, True), (3, through_files, True)),
        *((1, through_dict, True), (2, through_dict, False), (3, through_dict, False)),
    ],
)
def test_training_saved_on_two_ranks_resumes_on_one_to_three(
    world, train, states, groups, size, use_orig_params, carry
):
    def make(size, steps, **spec):
        return train(steps, group=groups[size], **spec) if world.rank < size else None

    saving = make(2, 2, use_orig_params=use_orig_params)
    other = {"use_orig_params": not use_orig_params, **OTHER}
    loading = carry(world, states, saving, lambda: make(size, 3, **other))
    # The mean of one or two equal gradients is exact; a third of a sum of three is not.
    check_resumed(world, states, saving, loading, torch.float32 if size == 3 else EXACT)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_hybrid_training_resumes_from_each_type(world, train, states, kind):
    mesh = world.mesh(2, world.size // 2, names=("replicate", "shard"))
    pair = mesh.get_group("shard"), mesh.get_group("replicate")
    saving, loading = (train(steps, group=pair, strategy="HYBRID_SHARD") for steps in (2, 3))
    states.load_all(*loading.both, states.all(*saving.both, kind), kind)
    check_resumed(world, states, saving, loading)
    if kind == "FULL":
        of_first = states.all(*saving.both, rank0=True)
        assert [bool(part) for part in of_first.values()] == [world.rank == 0] * 2
