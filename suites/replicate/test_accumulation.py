"""Gradients of several backwards add up, synced or not, and nothing of them is left for the next step."""

import pytest
import torch
from torch import nn

from harness.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POLICIES = {"policy": [(), (F16,), (BF16, F32), (None, BF16)]}
EVERY_WEIGHT = [f"{index}.weight" for index in range(4)]


class Switched(nn.Sequential):
    """Two weights; forward is told which of them to use."""

    def __init__(self):
        super().__init__(KnownGradient(3), KnownGradient(3))

    def forward(self, gradient, used):
        return torch.stack([self[index](gradient) for index in used]).sum()


def backward(model, world, value, *more):
    """Give every weight the gradient ``value``, in the mean of half and one and a half of it."""
    gradient = torch.tensor(value * (0.5 + world.rank), device=world.device)
    model(gradient, *more).backward()


def gradients_of(model):
    """Return the one value that all elements of each full gradient have, by name; None without one."""
    found = {}
    for name, p in model.named_parameters():
        values = None if p.grad is None else p.grad.full_tensor().unique().tolist()
        assert values is None or len(values) == 1, (name, values)
        found[name] = values and values[0]
    return found


def every_weight(value):
    return dict.fromkeys(EVERY_WEIGHT, value)


def known(world, front, **settings):
    return front.apply(KnownGradients(3).to(world.device), KnownGradients.units, **settings)


def test_synced_and_unsynced_backwards_add_up_in_every_precision(world, front, run_subtests):
    settings = {**POLICIES, "syncs": [(True,), (False, True), (True, False, True), (False, False, True)]}
    run_subtests(settings, check_sum, world, front)


def check_sum(world, front, policy, syncs):
    model = known(world, front, **front.precision(*policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in (1, 2):
        for index, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            backward(model, world, 2.0**index)
        total = 2.0 ** len(syncs) - 1
        assert gradients_of(model) == every_weight(total)
        assert {p.grad.dtype for p in model.parameters()} == {F32}
        optimizer.step()
        optimizer.zero_grad()
        values = [p.full_tensor().unique().tolist() for p in model.parameters()]
        assert values == [[-total * step]] * 4


def test_without_sync_gradients_stay_out_of_sight(world, front):
    model = known(world, front)
    model.set_requires_gradient_sync(False)
    backward(model, world, 1.0)
    assert gradients_of(model) == every_weight(None)
    model.set_requires_gradient_sync(True)
    backward(model, world, 2.0)
    assert gradients_of(model) == every_weight(3.0)


def test_unsynced_gradients_add_up_in_the_reduce_dtype(world, front):
    model = known(world, front, **front.precision(F16, F32))
    for value, sync in [(1.0, False), (2.0**-12, False), (2.0**-12, True)]:
        model.set_requires_gradient_sync(sync)
        model(torch.tensor(value, device=world.device)).backward()
    assert gradients_of(model) == every_weight(1 + 2**-11)  # fp16 has no such number


def test_two_backwards_over_one_graph_give_exactly_twice(world, front, run_subtests):
    """pytorch#73784: the second gradient took the place of the first."""
    run_subtests(POLICIES, check_twice, world, front)


def check_twice(world, front, policy):
    model = known(world, front, **front.precision(*policy))
    loss = model(torch.tensor(1.0 + world.rank, device=world.device))
    loss.backward(retain_graph=True)
    assert gradients_of(model) == every_weight(1.5)
    loss.backward()
    assert gradients_of(model) == every_weight(3.0)


@pytest.mark.parametrize("used", [[(0,), (0,), (0, 1)], [(0, 1), (0,), (0,)], [(0,), (1,), (0,)]], ids=str)
@pytest.mark.parametrize("units", [(), ("0", "1")], ids=["one_group", "units"])
def test_a_parameter_may_be_used_in_some_microbatches_only(world, front, run_subtests, used, units):
    """pytorch#196996: an accumulated fp32 gradient and a fresh one in bf16 met in one group."""
    run_subtests({**POLICIES, "sync": [True, False]}, check_used, world, front, used=used, units=units)


def check_used(world, front, used, units, policy, sync):
    model = front.apply(Switched().to(world.device), units, **front.precision(*policy))
    for index, of_microbatch in enumerate(used):
        model.set_requires_gradient_sync(sync or index == 2)
        backward(model, world, 2.0**index, of_microbatch)
    assert gradients_of(model) == {
        f"{weight}.weight": sum(2.0**index for index, now in enumerate(used) if weight in now)
        for weight in (0, 1)
    }


def test_one_hot_gradients_of_microbatches_add_up_and_do_not_leak_into_the_next_step(world, front):
    """DeepSpeed#7985: the last microbatch was seen again in the next step."""
    model = front(KnownGradient(5).to(world.device))
    for _ in range(2):
        for index, microbatch in enumerate(torch.eye(5, device=world.device) * 2 * world.rank):
            model.set_requires_gradient_sync(index == 4)
            model(microbatch).backward()
        assert model.weight.grad.full_tensor().tolist() == [1.0] * 5
        model.zero_grad()


def test_backwards_that_are_not_the_last_leave_the_same_sum(world, front):
    model = known(world, front)
    for index in range(3):
        model.set_is_last_backward(index == 2)
        backward(model, world, 2.0**index)
    assert gradients_of(model) == every_weight(7.0)


def test_parameters_kept_between_microbatches_are_new_after_the_step(world, front):
    model = known(world, front)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        for index in range(3):
            is_last = index == 2
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            backward(model, world, 2.0**index)
        assert gradients_of(model) == every_weight(7.0)
        optimizer.step()
        optimizer.zero_grad()
    # The weights are -14 now: so is each of the four sums over three elements, times the gradient.
    assert model(torch.tensor(1.0, device=world.device)).item() == -14.0 * 3 * 4


@pytest.mark.parametrize("policy", [(), (BF16,)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(torch.optim.SGD, {"foreach": True}), (torch.optim.SGD, {}), (torch.optim.Adam, {"fused": True})],
    ids=["foreach", "one_by_one", "fused"],
)
def test_parameters_that_are_always_kept_are_new_after_the_step_all_the_same(world, front, policy, kind, way):
    """torch 2.13 goes on with what it gathered before the step."""
    model = known(world, front, **front.precision(*policy))
    model.set_reshard_after_backward(False)
    optimizer = kind(model.parameters(), lr=1.0, **way)
    for number in (1, 2):
        backward(model, world, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        output = model(torch.tensor(1.0, device=world.device))
        assert output.item() == pytest.approx(-number * 3 * 4, rel=1e-2)  # one unit of bf16


def test_several_forwards_before_one_backward_add_up(world, front):
    model = known(world, front)
    losses = [model(torch.tensor(2.0**n * (1 + world.rank), device=world.device)) for n in range(3)]
    with torch.no_grad():
        model(torch.tensor(100.0, device=world.device))
    sum(losses).backward()
    assert gradients_of(model) == every_weight(7 * 1.5)


@pytest.mark.parametrize("in_order", [True, False], ids=["in_order", "in_reverse"])
def test_several_forwards_may_go_backward_one_by_one(world, front, in_order):
    model = known(world, front)
    losses = [model(torch.tensor(2.0**n * (1 + world.rank), device=world.device)) for n in range(3)]
    for loss in losses if in_order else reversed(losses):
        loss.backward()
    assert gradients_of(model) == every_weight(7 * 1.5)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_a_step_begins_with_no_gradient_of_the_one_before(world, front, set_to_none):
    model = known(world, front)
    for value in (1.0, 5.0):
        model.zero_grad(set_to_none)
        backward(model, world, value)
        assert gradients_of(model) == every_weight(value)
