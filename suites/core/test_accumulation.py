"""Gradients of several backwards add up, synced or not, and nothing of them is left for the next step."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from harness.conformance import Capability, Precision, ShardSpec, offers, require
from harness.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)
OPTIONS = {
    "strategy": STRATEGIES,
    "use_orig_params": [False, True],
    "offload": [False, True],
    "precision": [Precision(), Precision(F16), Precision(BF16, F32), Precision(reduce_dtype=BF16)],
}


class Switched(nn.Sequential):
    """Two weights in one group; forward is told which of them to use."""

    def __init__(self):
        super().__init__(KnownGradient(3), KnownGradient(3))

    def forward(self, gradient, used):
        return torch.stack([self[index](gradient) for index in used]).sum()


def shard(world, engine, bare, strategy="FULL_SHARD", **more):
    units = getattr(bare, "units", ())
    return engine.shard(bare.to(world.device), ShardSpec(strategy, units=units, device=world.device, **more))


def backward(engine, model, world, value, *more, sync=True):
    """Give every weight the gradient ``value``, in the mean of half and one and a half of it."""
    gradient = torch.tensor(value * (0.5 + world.rank), device=world.device)
    with nullcontext() if sync else engine.no_sync(model):
        model(gradient, *more).backward()


def gradients_of(engine, model):
    """Return the one value that all elements of each full gradient have, by name."""
    found = {name: g.unique().tolist() for name, g in engine.full_gradients(model).items()}
    assert all(len(values) == 1 for values in found.values()), found
    return {name: values[0] for name, values in found.items()}


def every_weight(value):
    return {f"{index}.weight": value for index in range(4)}


def test_synced_and_unsynced_backwards_add_up_under_all_options(world, engine, run_subtests):
    """pytorch#98494: dtypes clashed for original parameters with offload in no_sync, and no test ran it."""
    run_subtests({**OPTIONS, "syncs": [(False, True), (True, False, True)]}, check_sum, world, engine)


def check_sum(world, engine, syncs, **options):
    model = shard(world, engine, KnownGradients(3), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in (1, 2):
        for index, sync in enumerate(syncs):
            backward(engine, model, world, 2.0**index, sync=sync)
        total = 2.0 ** len(syncs) - 1
        assert gradients_of(engine, model) == every_weight(total)
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
        optimizer.step()
        optimizer.zero_grad()
        values = [p.unique().tolist() for p in engine.full_parameters(model).values()]
        assert values == [[-total * step]] * 4


def test_two_backwards_over_one_graph_give_exactly_twice(world, engine, run_subtests):
    """pytorch#73784: with offload the second gradient took the place of the first."""
    run_subtests({**OPTIONS, "sync": [True, False]}, check_twice, world, engine)


def check_twice(world, engine, sync, **options):
    if not sync:
        require(engine, Capability.UNSYNCED_GRADIENTS)
    model = shard(world, engine, KnownGradients(3), **options)
    loss = model(torch.tensor(1.0 + world.rank, device=world.device))
    with nullcontext() if sync else engine.no_sync(model):
        loss.backward(retain_graph=True)
    once = gradients_of(engine, model)
    loss.backward()
    assert once == every_weight(1.5 if sync else 1.0 + world.rank)
    assert gradients_of(engine, model) == every_weight(3.0)


@pytest.mark.parametrize("used", [[(0,), (0,), (0, 1)], [(0, 1), (0,), (0,)], [(0,), (1,), (0,)]], ids=str)
def test_a_parameter_may_be_used_in_some_microbatches_only(world, engine, run_subtests, used):
    """pytorch#196996: an accumulated fp32 gradient and a fresh one in bf16 met in one group."""
    run_subtests({**OPTIONS, "sync": [True, False]}, check_used, world, engine, used=used)


def check_used(world, engine, used, sync, **options):
    model = shard(world, engine, Switched(), **options)
    for index, of_microbatch in enumerate(used):
        backward(engine, model, world, 2.0**index, of_microbatch, sync=sync or index == 2)
    assert gradients_of(engine, model) == {
        f"{weight}.weight": sum(2.0**index for index, now in enumerate(used) if weight in now)
        for weight in (0, 1)
    }


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_one_hot_gradients_of_microbatches_add_up_and_do_not_leak_into_the_next_step(
    world, engine, strategy, use_orig_params
):
    """DeepSpeed#7985: the last microbatch was seen again in the next step."""
    model = shard(world, engine, KnownGradient(5), strategy, use_orig_params=use_orig_params)
    one_hot = torch.eye(5, device=world.device) * 2 * world.rank
    for _ in range(2):
        with engine.no_sync(model):
            for microbatch in one_hot[:-1]:
                model(microbatch).backward()
        model(one_hot[-1]).backward()
        assert engine.full_gradients(model)["weight"].tolist() == [1.0] * 5
        model.zero_grad()


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_forgets_unsynced_gradients_and_what_waits_behind_them(
    world, engine, strategy, use_orig_params, offload, set_to_none
):
    require(engine, Capability.UNSYNCED_GRADIENTS)
    spec = {"use_orig_params": use_orig_params, "offload": offload}
    model = shard(world, engine, KnownGradients(3), strategy, **spec)
    backward(engine, model, world, 1.0)
    backward(engine, model, world, 2.0, sync=False)
    model.zero_grad(set_to_none)
    backward(engine, model, world, 5.0)
    assert gradients_of(engine, model) == every_weight(5.0)


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_unsynced_gradients_are_full_and_this_ranks_own(world, engine, strategy, use_orig_params):
    require(engine, Capability.UNSYNCED_GRADIENTS)
    model = shard(world, engine, KnownGradient(3), strategy, use_orig_params=use_orig_params)
    backward(engine, model, world, 2.0, sync=False)
    (parameter,) = model.parameters()
    assert parameter.grad.tolist() == [1.0 + 2 * world.rank] * 3
    assert engine.full_gradients(model)["weight"].tolist() == [1.0 + 2 * world.rank] * 3


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_unsynced_gradients_of_a_unit_that_sits_out_the_synced_backward_are_reduced(
    world, engine, strategy, use_orig_params, offload
):
    bare = Switched()
    bare.units = ("0", "1")
    model = shard(world, engine, bare, strategy, use_orig_params=use_orig_params, offload=offload)
    backward(engine, model, world, 2.0, (0, 1), sync=False)
    backward(engine, model, world, 4.0, (1,))
    assert gradients_of(engine, model) == {"0.weight": 2.0, "1.weight": 6.0}


@EVERY_STRATEGY
def test_several_forwards_before_one_backward_add_up(world, engine, strategy):
    model = shard(world, engine, KnownGradients(3), strategy)
    losses = [model(torch.tensor(2.0**n * (1 + world.rank), device=world.device)) for n in range(3)]
    with torch.no_grad():
        model(torch.tensor(100.0, device=world.device))
    sum(losses).backward()
    assert gradients_of(engine, model) == every_weight(7 * 1.5)
    if offers(engine, Capability.GROUPS):
        assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@EVERY_STRATEGY
@pytest.mark.parametrize("last", [True, False], ids=["in_order", "in_reverse"])
def test_several_forwards_may_go_backward_one_by_one(world, engine, strategy, last):
    model = shard(world, engine, KnownGradients(3), strategy)
    losses = [model(torch.tensor(2.0**n * (1 + world.rank), device=world.device)) for n in range(3)]
    for loss in losses if last else reversed(losses):
        loss.backward()
    assert gradients_of(engine, model) == every_weight(7 * 1.5)


@EVERY_STRATEGY
def test_kept_low_precision_gradients_add_up_beside_fp32_parameters(world, engine, strategy):
    precision = Precision(F16, keep_low_precision_grads=True)
    model = shard(world, engine, KnownGradients(3), strategy, precision=precision, use_orig_params=True)
    for sync in (True, False, True):
        backward(engine, model, world, 2.0, sync=sync)
    assert gradients_of(engine, model) == every_weight(6.0)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F16}


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_sum_of_no_sync_outlasts_a_conversion_and_is_reduced_by_a_backward_that_passes_by(
    world, engine, strategy, use_orig_params
):
    bare = Switched()
    more = {"units": ("1",), "use_orig_params": use_orig_params, "device": world.device}
    model = engine.shard(bare.to(world.device), ShardSpec(strategy, **more))
    backward(engine, model, world, 2.0, (0, 1), sync=False)
    model.double()
    backward(engine, model, world, 4.0, (0,))
    assert gradients_of(engine, model) == {"0.weight": 6.0, "1.weight": 2.0}
