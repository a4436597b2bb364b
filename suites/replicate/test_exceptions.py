"""Exceptions in a step: after the next zero_grad the model continues as if the step had not been."""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_sharded_parity
from lockstep.conformance.models import NestedWrappedModule

pytestmark = pytest.mark.ranks(2)

PLACES = ["module.0", "module.1", "module.1.0", "module.1.1", "module.2", "module.3", ""]


class Planted(Exception):
    """An exception raised on purpose."""


def raise_planted(*_):
    raise Planted


def plant(model, place, phase):
    """Make a module raise before or after its forward, or when a gradient passes through its output."""
    module = model.get_submodule(place)
    if phase == "before_forward":
        return module.register_forward_pre_hook(raise_planted)
    if phase == "after_forward":
        return module.register_forward_hook(raise_planted)

    def raise_in_backward(_module, _inputs, output):
        output.register_hook(raise_planted)

    return module.register_forward_hook(raise_in_backward)


@pytest.mark.parametrize("phase", ["before_forward", "after_forward", "in_backward"])
@pytest.mark.parametrize("sync", [True, False], ids=["synced", "unsynced"])
def test_an_exception_is_survived_by_the_next_step(world, front, run_subtests, phase, sync):
    """torch 2.13 wants reset_iter_state called, and still adds what a failed backward had left."""
    run_subtests({"place": PLACES}, check_survival, world, front, phase=phase, sync=sync)


def check_survival(world, front, place, phase, sync):
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    generator = torch.Generator().manual_seed(world.seed)
    batches = torch.randn(3, 2 * world.size, 8, generator=generator).to(world.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, model)]
    for number, batch in enumerate(batches):
        mine = batch.chunk(world.size)[world.rank]
        if number == 1:
            fail_once(model, mine, place, phase, sync)
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference(batch).square().mean().backward()
        model(mine).square().mean().backward()
        assert_sharded_parity(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    assert_sharded_parity(model, reference)


def fail_once(model, batch, place, phase, sync):
    model.set_requires_gradient_sync(sync)
    if not sync and phase != "in_backward":  # what was accumulated before is forgotten, too
        model(batch).square().mean().backward()
    planted = plant(model, place, phase)
    with pytest.raises(Planted):
        model(batch).square().mean().backward()
    planted.remove()
    model.set_requires_gradient_sync(True)


def test_a_backward_that_raised_may_be_run_again(world, front):
    """Gradients that it had begun to reduce are not added to those of the second one."""
    reference = NestedWrappedModule().to(world.device)
    model = front.shard(copy.deepcopy(reference))
    faults = [Planted()]

    def raise_once(_):
        if faults:
            raise faults.pop()

    def watch(_module, _arguments, output):
        output.register_hook(raise_once)

    model.get_submodule("module.0").register_forward_hook(watch)
    x = torch.arange(16.0, device=world.device).view(2, 8) / 16
    loss = model(x).square().sum()
    with pytest.raises(Planted):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    reference(x).square().sum().backward()
    assert_sharded_parity(model, reference)


def test_a_model_whose_backward_raised_may_become_a_part_of_another(world, front):
    """Gradients that it had begun to reduce are not added to those of the whole."""
    reference = nn.Sequential(NestedWrappedModule(), nn.Linear(8, 2)).to(world.device)
    model = copy.deepcopy(reference)
    front.shard(model[0])
    planted = plant(model[0], "module.0", "in_backward")
    x = torch.arange(16.0, device=world.device).view(2, 8) / 16
    with pytest.raises(Planted):
        model[0](x).square().sum().backward()
    planted.remove()
    front(model)
    model.zero_grad()
    for module in (reference, model):
        module(x).square().sum().backward()
    assert_sharded_parity(model, reference)


@pytest.mark.parametrize("phase", ["before_forward", "after_forward", "in_backward"])
@pytest.mark.parametrize("policy", [(), (torch.bfloat16,)], ids=["fp32", "bf16"])
def test_parameters_are_sharded_ones_after_an_exception(world, front, phase, policy):
    """torch 2.13 leaves those of the groups under way in full."""
    model = front.shard(NestedWrappedModule(), **front.precision(*policy))
    before = list(model.parameters())
    plant(model, "module.1.1", phase)
    with pytest.raises(Planted):
        model(torch.ones(2, 8, device=world.device)).sum().backward()
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert {p.placements for p in before} == {front.placements}
