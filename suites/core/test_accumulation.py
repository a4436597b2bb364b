"""Gradients of several backwards: they add up, synced or not, and nothing is left for the next step."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from lockstep.conformance import Capability, Precision, offers, require
from lockstep.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PRECISIONS = [Precision(), Precision(F16), Precision(BF16, F32), Precision(reduce_dtype=BF16)]


def options(front):
    """Return the settings that sums must not depend on."""
    offload = {} if front.is_composable else {"offload": [False, True]}
    return {**offload, "precision": PRECISIONS}


class Switched(nn.Sequential):
    """Two weights; an argument of forward selects which of them to use."""

    def __init__(self):
        super().__init__(KnownGradient(3), KnownGradient(3))

    def forward(self, gradient, used):
        return torch.stack([self[index](gradient) for index in used]).sum()


@pytest.fixture
def backward(world):
    """Give every weight the gradient `value`, in the mean of half and one and a half of it."""

    def backward(front, model, value, *more, sync=True):
        gradient = torch.tensor(value * (0.5 + world.rank), device=world.device)
        with nullcontext() if sync else front.no_sync(model):
            front.backward(model, model(gradient, *more))

    return backward


def gradients_of(front, model):
    """Return the one value that all elements of each full gradient have, by name."""
    found = {name: g.unique().tolist() for name, g in front.full_gradients(model).items()}
    assert all(len(values) == 1 for values in found.values()), found
    return {name: values[0] for name, values in found.items()}


def every_weight(value):
    return {f"{index}.weight": value for index in range(4)}


def test_synced_and_unsynced_backwards_add_up(front, backward, run_subtests):
    """pytorch#98494: dtypes clashed for original parameters with offload in no_sync, and no test ran it."""

    def check(syncs, **spec):
        model = front.shard(KnownGradients(3), **spec)
        optimizer = front.optimizer(model, partial(torch.optim.SGD, lr=1.0))
        for step in (1, 2):
            for index, sync in enumerate(syncs):
                backward(front, model, 2.0**index, sync=sync)
            total = 2.0 ** len(syncs) - 1
            assert gradients_of(front, model) == every_weight(total)
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F32}
            optimizer.step()
            optimizer.zero_grad()
            values = [p.unique().tolist() for p in front.full_parameters(model).values()]
            assert values == [[-total * step]] * 4

    syncs = [(True,), (False, True), (True, False, True), (False, False, True)]
    run_subtests({**options(front), "syncs": syncs}, check)


@pytest.mark.basic(3)
def test_two_backwards_over_one_graph_give_exactly_twice(world, engine, front, run_subtests):
    """pytorch#73784: with offload the second gradient replaced the first."""

    def check(sync, **spec):
        if not sync:
            require(engine, Capability.UNSYNCED_GRADIENTS)
        model = front.shard(KnownGradients(3), **spec)
        loss = model(torch.tensor(1.0 + world.rank, device=world.device))
        with nullcontext() if sync else front.no_sync(model):
            front.backward(model, loss, retain_graph=True)
        once = gradients_of(front, model)
        front.backward(model, loss)
        assert once == every_weight(1.5 if sync else 1.0 + world.rank)
        assert gradients_of(front, model) == every_weight(3.0)

    # A composable front does not show gradients that are not reduced.
    run_subtests({**options(front), "sync": [True] if front.is_composable else [True, False]}, check)


@pytest.mark.parametrize("used", [[(0,), (0,), (0, 1)], [(0, 1), (0,), (0,)], [(0,), (1,), (0,)]], ids=str)
def test_a_parameter_may_be_used_in_some_microbatches_only(front, backward, run_subtests, used):
    """pytorch#196996: an accumulated fp32 gradient and a fresh one in bf16 met in one group."""

    def check(sync, **spec):
        model = front.shard(Switched(), **spec)
        for index, of_microbatch in enumerate(used):
            backward(front, model, 2.0**index, of_microbatch, sync=sync or index == 2)
        assert gradients_of(front, model) == {
            f"{weight}.weight": sum(2.0**index for index, now in enumerate(used) if weight in now)
            for weight in (0, 1)
        }

    units = {"units": [(), ("0", "1")]} if front.is_composable else {}
    run_subtests({**units, **options(front), "sync": [True, False]}, check)


def test_gradients_of_microbatches_do_not_leak_into_next_step(world, front):
    """DeepSpeed#7985: the last microbatch was seen again in the next step."""
    model = front.shard(KnownGradient(5))
    one_hot = torch.eye(5, device=world.device) * 2 * world.rank
    for _ in range(2):
        with front.no_sync(model):
            for microbatch in one_hot[:-1]:
                front.backward(model, model(microbatch))
        front.backward(model, model(one_hot[-1]))
        assert front.full_gradients(model)["weight"].tolist() == [1.0] * 5
        model.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_unsynced_gradients(
    engine, shard, backward, strategy, use_orig_params, offload, set_to_none
):
    require(engine, Capability.UNSYNCED_GRADIENTS)
    model = shard(KnownGradients(3), strategy, use_orig_params=use_orig_params, offload=offload)
    backward(engine, model, 1.0)
    backward(engine, model, 2.0, sync=False)
    model.zero_grad(set_to_none)
    backward(engine, model, 5.0)
    assert gradients_of(engine, model) == every_weight(5.0)


def test_unsynced_gradients_are_full_and_this_ranks_own(
    world, engine, shard, backward, strategy, use_orig_params
):
    require(engine, Capability.UNSYNCED_GRADIENTS)
    model = shard(KnownGradient(3), strategy, use_orig_params=use_orig_params)
    backward(engine, model, 2.0, sync=False)
    (parameter,) = model.parameters()
    assert parameter.grad.tolist() == [1.0 + 2 * world.rank] * 3
    assert engine.full_gradients(model)["weight"].tolist() == [1.0 + 2 * world.rank] * 3


def test_a_synced_backward_reduces_gradients_of_idle_units(
    engine, shard, backward, strategy, use_orig_params, offload
):
    spec = {"units": ("0", "1"), "use_orig_params": use_orig_params, "offload": offload}
    model = shard(Switched(), strategy, **spec)
    backward(engine, model, 2.0, (0, 1), sync=False)
    backward(engine, model, 4.0, (1,))
    assert gradients_of(engine, model) == {"0.weight": 2.0, "1.weight": 6.0}


def three_losses(world, model):
    return [model(torch.tensor(2.0**n * (1 + world.rank), device=world.device)) for n in range(3)]


def test_several_forwards_before_one_backward_add_up(world, engine, front):
    model = front.shard(KnownGradients(3))
    losses = three_losses(world, model)
    with torch.no_grad():
        model(torch.tensor(100.0, device=world.device))
    front.backward(model, sum(losses))
    assert gradients_of(front, model) == every_weight(7 * 1.5)
    if offers(engine, Capability.GROUPS):
        assert {group.gathered_bytes for group in engine.groups(model)} == {0}


@pytest.mark.parametrize("in_order", [True, False], ids=["in_order", "in_reverse"])
def test_several_forwards_may_go_backward_one_by_one(world, front, in_order):
    model = front.shard(KnownGradients(3))
    losses = three_losses(world, model)
    for loss in losses if in_order else reversed(losses):
        front.backward(model, loss)
    assert gradients_of(front, model) == every_weight(7 * 1.5)


def test_kept_low_precision_gradients_add_up(engine, shard, backward, strategy):
    precision = Precision(F16, keep_low_precision_grads=True)
    model = shard(KnownGradients(3), strategy, precision=precision, use_orig_params=True)
    for sync in (True, False, True):
        backward(engine, model, 2.0, sync=sync)
    assert gradients_of(engine, model) == every_weight(6.0)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {F16}


def test_unsynced_gradients_survive_a_conversion_of_the_model(
    engine, shard, backward, strategy, use_orig_params
):
    model = shard(Switched(), strategy, units=("1",), use_orig_params=use_orig_params)
    backward(engine, model, 1.0, (0, 1))
    backward(engine, model, 2.0, (0, 1), sync=False)
    model.double()
    backward(engine, model, 4.0, (0,))
    assert gradients_of(engine, model) == {"0.weight": 7.0, "1.weight": 3.0}
