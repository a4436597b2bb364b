"""What travels between ranks: how often, in which order, in which dtype and how many bytes, exactly."""

import pytest
import torch
from torch import nn

from harness.conformance import Capability, Precision, ShardSpec, offers
from harness.conformance.models import KnownGradient, NestedWrappedModule

pytestmark = pytest.mark.ranks(2, 3)  # on three ranks every group of the model has some padding

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

NUMEL = {"": 76, "module.1": 272, "module.1.0": 80, "module.2": 68}
FORWARD = ("", "module.1", "module.1.0", "module.2")
BACKWARD = ("", "module.2", "module.1", "module.1.0")
REDUCED = ("module.2", "module.1", "module.1.0", "")  # the root last: it holds the first layer
# Which groups are gathered, in order: in forward, in backward.
GATHERED = {"FULL_SHARD": (FORWARD, BACKWARD), "SHARD_GRAD_OP": (FORWARD, ()), "NO_SHARD": ((), ())}

# precision -> dtype of gathers, dtype of reductions
DTYPES = {
    Precision(): (F32, F32),
    Precision(param_dtype=F16): (F16, F16),
    Precision(param_dtype=BF16, reduce_dtype=F32): (BF16, F32),
    Precision(reduce_dtype=BF16): (F32, BF16),
}


def full_numel(world, engine, model):
    """Return how many elements each group has with its padding, by name."""
    found = {group.name: group.full_numel for group in engine.groups(model)}
    if offers(engine, Capability.ONE_PADDING):
        assert all(found[name] in (numel, padded(world, numel)) for name, numel in NUMEL.items())
    return found


def padded(world, numel):
    return -(-numel // world.size) * world.size


def shard_bytes(world, engine, model, dtype, names):
    """Return the dtype and size of one rank's shard of each group, padding included."""
    numel = full_numel(world, engine, model)
    return [(dtype, padded(world, numel[name]) // world.size * dtype.itemsize) for name in names]


def full_bytes(world, engine, model, dtype, names, whole=False):
    """Return the dtype and size of each whole group, unless told padded so that every rank has as much."""
    numel = full_numel(world, engine, model)
    sizes = (numel[name] if whole else padded(world, numel[name]) for name in names)
    return [(dtype, size * dtype.itemsize) for size in sizes]


def gathers(engine, log, *, in_backward):
    """Return dtype and bytes of the gathers of parameters, in order."""
    found = engine.traffic(log).gathers
    return [(entry.dtype, entry.nbytes) for entry in found if entry.in_backward == in_backward]


def reductions(engine, log):
    """Return dtype and bytes of the reductions, in order; all of them are in backward."""
    found = engine.traffic(log).reductions
    assert all(entry.in_backward for entry in found), log
    return [(entry.dtype, entry.nbytes) for entry in found]


def reduced_bytes(world, engine, model, log, strategy, dtype, names=REDUCED):
    whole = strategy == "NO_SHARD" and "all_reduce" in log.counts()
    return full_bytes(world, engine, model, dtype, names, whole)


def check_gathers(world, engine, model, log, strategy, dtype, steps=1):
    for in_backward, names in enumerate(GATHERED[strategy]):
        found = gathers(engine, log, in_backward=bool(in_backward))
        assert found == shard_bytes(world, engine, model, dtype, names) * steps, log


def check_reductions(world, engine, model, log, strategy, dtype, steps=1, names=REDUCED):
    found = reductions(engine, log)
    expected = reduced_bytes(world, engine, model, log, strategy, dtype, names) * steps
    if not offers(engine, Capability.EARLY_REDUCTION):  # a group waits for all that is inside its modules
        found, expected = sorted(found, key=str), sorted(expected, key=str)
    assert found == expected, log
    assert engine.traffic(log).others == (), log


@pytest.mark.parametrize("precision", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"])
def test_a_step_gathers_and_reduces_by_strategy(
    world, engine, shard, batch, collectives, strategy, offload, precision
):
    """What goes over the wire is cast before, not after (pytorch#154975)."""
    model = shard(NestedWrappedModule(), strategy, precision=precision, offload=offload)
    for _ in range(2):
        model(batch()).float().sum().backward()
    gathered, reduced = DTYPES[precision]
    check_gathers(world, engine, model, collectives, strategy, gathered, steps=2)
    check_reductions(world, engine, model, collectives, strategy, reduced, steps=2)


@pytest.mark.parametrize("precision", list(DTYPES)[::2], ids=["fp32", "bf16_reduced_in_fp32"])
def test_no_sync_reduces_nothing_and_the_next_backward_all(
    world, engine, shard, batch, collectives, strategy, use_orig_params, offload, precision
):
    """huggingface/accelerate#3762: gradients were communicated all the same."""
    spec = {"use_orig_params": use_orig_params, "offload": offload, "precision": precision}
    model = shard(NestedWrappedModule(), strategy, **spec)
    with engine.no_sync(model):
        for _ in range(2):
            model(batch()).float().sum().backward()
    assert reductions(engine, collectives) == []
    model(batch()).float().sum().backward()
    gathered, reduced = DTYPES[precision]
    check_gathers(world, engine, model, collectives, strategy, gathered, steps=3)
    check_reductions(world, engine, model, collectives, strategy, reduced, steps=1)


def test_every_synced_backward_of_an_accumulation_reduces(world, engine, shard, batch, collectives, strategy):
    model = shard(NestedWrappedModule(), strategy)
    loss = model(batch()).float().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    check_reductions(world, engine, model, collectives, strategy, F32, steps=2)
    # What was kept for the first backward is freed by it.
    again = {"FULL_SHARD": BACKWARD * 2, "SHARD_GRAD_OP": BACKWARD, "NO_SHARD": ()}[strategy]
    found = gathers(engine, collectives, in_backward=True)
    assert found == shard_bytes(world, engine, model, F32, again)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gathers_each_group_once_and_keeps_none(
    world, engine, shard, batch, collectives, strategy, dtype, mode
):
    model = shard(NestedWrappedModule(), strategy, precision=Precision(param_dtype=dtype)).eval()
    with mode():
        model(batch()).float().sum()
        assert {group.state.name for group in engine.groups(model)} == {"SHARDED"}
        model(batch()).float().sum()
    expected = shard_bytes(world, engine, model, dtype, GATHERED[strategy][0]) * 2
    assert gathers(engine, collectives, in_backward=False) == expected
    assert reductions(engine, collectives) == []


def test_a_forward_without_backward_is_forgotten_by_the_next(
    world, engine, shard, batch, collectives, strategy
):
    model = shard(NestedWrappedModule(), strategy)
    model(batch()).float().sum()
    model(batch()).float().sum().backward()
    first, second = GATHERED[strategy]
    assert (
        gathers(engine, collectives, in_backward=False) == shard_bytes(world, engine, model, F32, first) * 2
    )
    assert gathers(engine, collectives, in_backward=True) == shard_bytes(world, engine, model, F32, second)
    check_reductions(world, engine, model, collectives, strategy, F32)


def test_a_frozen_group_is_gathered_in_backward_but_not_reduced(
    world, engine, shard, batch, collectives, strategy, use_orig_params
):
    bare = NestedWrappedModule()
    model = shard(bare, strategy, use_orig_params=use_orig_params)
    bare.module[2].requires_grad_(False)
    model(batch()).float().sum().backward()
    check_gathers(world, engine, model, collectives, strategy, F32)
    check_reductions(world, engine, model, collectives, strategy, F32, names=REDUCED[1:])


def test_a_frozen_group_out_of_backward_is_gathered_once(world, engine, collectives, strategy):
    bare = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)).to(world.device)
    model = engine.shard(bare, ShardSpec(strategy, units=(nn.Linear,)))
    model(torch.ones(2, 4)).sum().backward()
    num = {"FULL_SHARD": (2, 1), "SHARD_GRAD_OP": (2, 0), "NO_SHARD": (0, 0)}[strategy]
    found = [len(gathers(engine, collectives, in_backward=where)) for where in (False, True)]
    assert (tuple(found), len(reductions(engine, collectives))) == (num, 1)
    assert [group.gathered_bytes for group in engine.groups(model)] == [0, 0]


def test_a_module_used_twice_in_one_forward_is_reduced_once(world, engine, collectives, strategy):
    """facebookresearch/fairscale#513."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = KnownGradient(3)

        def forward(self, x):
            return self.inner(x) + self.inner(10 * x)

    model = engine.shard(Twice().to(world.device), ShardSpec(strategy, units=("inner",)))
    model(torch.tensor(2.0 * world.rank)).backward()
    assert engine.full_gradients(model)["inner.weight"].tolist() == [11.0 * (world.size - 1)] * 3
    assert len(reductions(engine, collectives)) == 1


@pytest.mark.ranks(2)
def test_a_module_that_all_ranks_skip_sends_nothing(world, engine, collectives, strategy):
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.skipped = KnownGradient(2), KnownGradient(6)

        def forward(self, x):
            return self.used(x)

    model = engine.shard(Skipping().to(world.device), ShardSpec(strategy, units=(KnownGradient,)))
    model(torch.ones(())).backward()
    assert reductions(engine, collectives) == [(F32, 8)]
    assert {nbytes for _, nbytes in gathers(engine, collectives, in_backward=False)} <= {4}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("precision", DTYPES, ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_bf16"])
def test_one_rank_communicates_nothing(engine, shard, batch, collectives, strategy, precision):
    model = shard(NestedWrappedModule(), strategy, precision=precision)
    model(batch()).float().sum().backward()
    engine.clip_grad_norm_(model, 1.0)
    assert list(collectives) == []
