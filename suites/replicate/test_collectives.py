"""What a step of the composable fronts sends: how often, in which dtype, how many bytes."""

import pytest
import torch
from torch import nn

from harness.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(2, 3)  # on three ranks every parameter of the model has some padding

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

GROUPS = {
    "": ("module.0", "module.3"),
    "module.1": ("module.1.1",),
    "module.1.0": ("module.1.0",),
    "module.2": ("module.2",),
}
NO_ROOT = tuple(GROUPS)[1:]

# arguments of the policy -> dtype of gathers, dtype of reductions
DTYPES = {
    (): (F32, F32),
    (F16,): (F16, F16),
    (BF16, F32): (BF16, F32),
    (None, BF16): (F32, BF16),
}
EVERY_DTYPE = pytest.mark.parametrize(
    "policy", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"]
)


def padded_numel(group, num_shards):
    """Return the elements of a group whose parameters are each cut along dim 0 in equal parts."""
    bare = NestedWrappedModule()
    shapes = [p.shape for name in GROUPS[group] for p in bare.get_submodule(name).parameters()]
    return sum(-(-s[0] // num_shards) * num_shards * s[1:].numel() for s in shapes)


def shards(dtype, num_shards, groups):
    """Return dtype, bytes and ranks of what a rank hands in where these groups are gathered."""
    nbytes = (padded_numel(name, num_shards) // num_shards * dtype.itemsize for name in groups)
    return sorted((str(dtype), n, num_shards) for n in nbytes)


def wholes(dtype, num_shards, groups, num_ranks):
    """Return dtype, bytes and ranks of what a rank hands in where these groups are reduced."""
    return sorted((str(dtype), padded_numel(name, num_shards) * dtype.itemsize, num_ranks) for name in groups)


def seen(entries, in_backward=None):
    return sorted(
        (str(e.dtype), e.nbytes, e.group_size) for e in entries if in_backward in (None, e.in_backward)
    )


def check_gathers(engine, world, log, dtype, in_forward, in_backward):
    gathers = engine.traffic(log).gathers
    assert seen(gathers, in_backward=False) == shards(dtype, world.size, in_forward), log
    assert seen(gathers, in_backward=True) == shards(dtype, world.size, in_backward), log


def check_reductions(front, world, log, dtype, groups):
    """Each of ``groups`` was reduced once over all ranks, in backward, and nothing else was sent."""
    traffic = front.engine.traffic(log)
    assert seen(traffic.reductions, in_backward=False) == [], log
    assert traffic.others == (), log
    if front.shards or "all_reduce" in log.counts():
        num_shards = world.size if front.shards else 1
        assert seen(traffic.reductions) == wholes(dtype, num_shards, groups, world.size), log
    else:  # Low precision is summed piece by piece: as many elements for each rank.
        sizes = (-(-padded_numel(name, 1) // world.size) * world.size * dtype.itemsize for name in groups)
        assert seen(traffic.reductions) == sorted((str(dtype), size, world.size) for size in sizes), log


def nested(world, front, **settings):
    return front.shard(NestedWrappedModule(), **settings)


@EVERY_DTYPE
def test_a_step_gathers_groups_twice_and_the_root_once(world, fully_shard, step, collectives, policy):
    """What goes over the wire is cast before, not after (pytorch#154975)."""
    model = nested(world, fully_shard, **fully_shard.precision(*policy))
    step(model)
    gathered_in, reduced_in = DTYPES[policy]
    check_gathers(fully_shard.engine, world, collectives, gathered_in, GROUPS, NO_ROOT)
    check_reductions(fully_shard, world, collectives, reduced_in, GROUPS)


@EVERY_DTYPE
def test_replicas_reduce_each_group_once_and_gather_nothing(world, replicate, step, collectives, policy):
    model = nested(world, replicate, **replicate.precision(*policy))
    step(model)
    assert replicate.engine.traffic(collectives).gathers == (), collectives
    check_reductions(replicate, world, collectives, DTYPES[policy][1], GROUPS)


@pytest.mark.parametrize(
    ("reshard", "in_backward"), [(None, NO_ROOT), (True, GROUPS), (False, ())], ids=["None", "True", "False"]
)
@pytest.mark.parametrize("when", ["given", "set_later"])
def test_groups_resharded_after_forward_are_gathered_in_backward(
    world, fully_shard, collectives, step, reshard, in_backward, when
):
    model = nested(world, fully_shard, **({"reshard_after_forward": reshard} if when == "given" else {}))
    if when == "set_later" and reshard is not None:
        model.set_reshard_after_forward(reshard)
    step(model)
    check_gathers(fully_shard.engine, world, collectives, F32, GROUPS, in_backward)


@pytest.mark.ranks(4)
# The engine makes a process group of the few ranks, which lives as long as the process.
@pytest.mark.filterwarnings("ignore:.*left behind.*process group")
def test_reshard_to_fewer_ranks_between_forward_and_backward(world, fully_shard, step, collectives):
    model = nested(world, fully_shard, reshard_after_forward=2)
    step(model)
    gathers = fully_shard.engine.traffic(collectives).gathers
    assert seen(gathers, in_backward=False) == shards(F32, 4, GROUPS)
    assert seen(gathers, in_backward=True) == shards(F32, 2, GROUPS)
    check_reductions(fully_shard, world, collectives, F32, GROUPS)


def test_no_sync_reduces_nothing_and_the_next_step_all(world, front, step, collectives):
    """huggingface/accelerate#3762: gradients were communicated all the same."""
    model = nested(world, front)
    model.set_requires_gradient_sync(False)
    for number in range(2):
        step(model, number)
    assert front.engine.traffic(collectives).reductions == (), collectives
    model.set_requires_gradient_sync(True)
    step(model, 2)
    check_reductions(front, world, collectives, F32, GROUPS)


def test_sync_may_be_switched_off_for_one_unit_alone(world, front, step, collectives):
    model = nested(world, front)
    model.module[1].set_requires_gradient_sync(False, recurse=False)
    step(model)
    check_reductions(front, world, collectives, F32, [name for name in GROUPS if name != "module.1"])


def test_parameters_kept_after_backward_are_not_gathered_again(world, fully_shard, step, collectives):
    model = nested(world, fully_shard)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for number in range(3):
        step(model, number)
    # The first backward gathers what forward has freed, and nothing is freed after that but by forward.
    gathers = fully_shard.engine.traffic(collectives).gathers
    assert seen(gathers, in_backward=False) == shards(F32, world.size, GROUPS)
    assert seen(gathers, in_backward=True) == shards(F32, world.size, NO_ROOT * 3)


def test_a_frozen_group_is_not_reduced(world, front, step, collectives):
    bare = NestedWrappedModule().to(world.device)
    bare.module[2].requires_grad_(False)
    step(front.shard(bare))
    check_reductions(front, world, collectives, F32, [name for name in GROUPS if name != "module.2"])


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


@pytest.mark.ranks(1)
def test_one_rank_alone_sends_nothing(world, front, step, collectives):
    """torch 2.13 lets a replica reduce with itself."""
    model = nested(world, front)
    step(model)
    traffic = front.engine.traffic(collectives)
    assert (traffic.gathers, traffic.reductions, traffic.others) == ((), (), ()), collectives
    assert all(p.grad.full_tensor().any() for p in model.parameters())
