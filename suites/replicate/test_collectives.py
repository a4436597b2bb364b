"""Traffic of the composable fronts: how often, in which dtype, how many bytes."""

import pytest
import torch
from torch import nn

from lockstep.conformance.models import NestedWrappedModule

# On three ranks every parameter of the model has some padding.
pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.inside]

GROUPS = {
    "": ("module.0", "module.3"),
    "module.1": ("module.1.1",),
    "module.1.0": ("module.1.0",),
    "module.2": ("module.2",),
}
NO_ROOT = tuple(GROUPS)[1:]


def padded_numel(group, num_shards):
    """Return the elements of a group whose parameters are each sharded along dim 0 in equal parts."""
    bare = NestedWrappedModule()
    shapes = [p.shape for name in GROUPS[group] for p in bare.get_submodule(name).parameters()]
    return sum(-(-s[0] // num_shards) * num_shards * s[1:].numel() for s in shapes)


def seen(entries, in_backward):
    """Return bytes and ranks of the entries in forward or in backward."""
    return sorted((e.nbytes, e.group_size) for e in entries if e.in_backward == in_backward)


@pytest.fixture
def check_gathers(world, engine, collectives):
    """Hold gathers in forward and in backward to a rank's shard of each of these groups."""

    def check(in_forward, in_backward, later_shards=None):
        num_shards = world.size, later_shards or world.size
        gathers = engine.traffic(collectives).gathers
        for index, groups in enumerate((in_forward, in_backward)):
            size = num_shards[index]
            expected = sorted((4 * padded_numel(name, size) // size, size) for name in groups)
            assert seen(gathers, in_backward=bool(index)) == expected, collectives

    return check


@pytest.fixture
def check_reductions(world, engine, collectives):
    """Hold reductions to one of each of these groups over all ranks, in backward, with nothing else sent."""

    def check(front, groups):
        traffic, num_shards = engine.traffic(collectives), world.size if front.shards else 1
        assert (seen(traffic.reductions, in_backward=False), traffic.others) == ([], ()), collectives
        expected = sorted((4 * padded_numel(name, num_shards), world.size) for name in groups)
        assert seen(traffic.reductions, in_backward=True) == expected, collectives

    return check


@pytest.mark.parametrize(
    ("reshard", "in_backward"), [(None, NO_ROOT), (True, GROUPS), (False, ())], ids=["None", "True", "False"]
)
@pytest.mark.parametrize("when", ["given", "set_later"])
def test_groups_resharded_after_forward_are_gathered_in_backward(
    fully_shard, step, check_gathers, reshard, in_backward, when
):
    settings = {"reshard_after_forward": reshard} if when == "given" else {}
    model = fully_shard.shard(NestedWrappedModule(), **settings)
    if when == "set_later" and reshard is not None:
        model.set_reshard_after_forward(reshard)
    step(model)
    check_gathers(GROUPS, in_backward)


def test_to_reshard_to_one_rank_is_to_keep(world, fully_shard, step, check_gathers):
    model = fully_shard.shard(NestedWrappedModule(), reshard_after_forward=1)
    model.module[1].set_reshard_after_forward(True, recurse=False)
    step(model)
    check_gathers(GROUPS, ["module.1"])


def test_all_ranks_may_be_given_by_their_number(world, fully_shard, step, check_gathers):
    step(fully_shard.shard(NestedWrappedModule(), reshard_after_forward=world.size))
    check_gathers(GROUPS, GROUPS)


@pytest.mark.ranks(4)
# The engine makes a process group of the few ranks, which lives as long as the process.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
def test_reshard_to_fewer_ranks_between_forward_and_backward(
    fully_shard, step, check_gathers, check_reductions
):
    model = fully_shard.shard(NestedWrappedModule(), reshard_after_forward=2)
    step(model)
    check_gathers(GROUPS, GROUPS, later_shards=2)
    check_reductions(fully_shard, GROUPS)


def test_sync_may_be_switched_off_for_one_unit_alone(front, step, check_reductions):
    model = front.shard(NestedWrappedModule())
    model.module[1].set_requires_gradient_sync(False, recurse=False)
    step(model)
    check_reductions(front, [name for name in GROUPS if name != "module.1"])


def test_parameters_kept_after_backward_are_not_gathered_again(fully_shard, step, check_gathers):
    model = fully_shard.shard(NestedWrappedModule())
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for number in range(3):
        step(model, number)
    # The first backward gathers what forward has resharded; after that only forward reshards.
    check_gathers(GROUPS, NO_ROOT * 3)


def test_modules_in_one_list_are_one_group(world, front, collectives):
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).to(world.device)
    front([model[0], model[1]])
    front(model)
    model(torch.ones(2, 6, device=world.device)).sum().backward()
    traffic = front.engine.traffic(collectives)
    numel = 42  # dim 0 of every parameter is even for two ranks and for three
    sizes = [2 * numel, numel]
    assert sorted(e.nbytes // 4 for e in traffic.reductions) == sorted(sizes), collectives
    gathered = [size // world.size for size in (*sizes, sizes[0])] if front.shards else []
    assert sorted(e.nbytes // 4 for e in traffic.gathers) == sorted(gathered), collectives
