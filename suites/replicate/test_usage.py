"""Gradients of single parameters of a group: which there are, what travels, and the hooks on them."""

import copy

import pytest
import torch
from torch import nn

from lockstep.conformance.models import KnownGradient

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
POLICIES = pytest.mark.parametrize("policy", [(), (F16,), (BF16, F32)], ids=["fp32", "fp16", "bf16"])


class Three(nn.Module):
    """Three parameters in one group, of which forward uses those that it is given the names of."""

    def __init__(self, shape=(3, 2)):
        super().__init__()
        self.first, self.second, self.third = (KnownGradient(*shape) for _ in range(3))

    def forward(self, gradient, *names):
        return sum(getattr(self, name)(gradient) for name in names)


def gradients(model):
    """Return the one value of all elements of each gradient by name; None without a gradient."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is None or not gradient.requires_grad
        found[name.split(".")[0]] = None if gradient is None else gradient.full_tensor().unique().item()
    return found


def scaled(world, value):
    """Return what this rank gives for the mean `value`."""
    return torch.tensor(value + world.rank - (world.size - 1) / 2, device=world.device)


@POLICIES
@pytest.mark.ranks(1, 2, 3)
def test_a_parameter_that_no_rank_used_has_no_gradient(world, front, policy):
    model = front.shard(Three(), **front.precision(*policy))
    model(scaled(world, 3.0), "first", "third").backward()
    assert gradients(model) == {"first": 3.0, "second": None, "third": 3.0}


@pytest.mark.ranks(1, 2, 3)
def test_a_gradient_of_negative_zeros_is_that_of_a_parameter_that_was_used(world, front):
    model = front.shard(Three())
    model(torch.tensor(-0.0, device=world.device), "first", "third").backward()
    assert gradients(model) == {"first": 0.0, "second": None, "third": 0.0}


def test_negative_zeros_of_one_of_two_microbatches_are_a_gradient(world, front):
    model, zero = front.shard(Three()), torch.tensor(-0.0, device=world.device)
    model.set_requires_gradient_sync(False)
    model(zero, "first").backward()
    model.set_requires_gradient_sync(True)
    model(zero, "third").backward()
    assert gradients(model) == {"first": 0.0, "second": None, "third": 0.0}


def test_a_parameter_that_no_rank_used_differs_from_one_without_elements(world, front):
    bare = Three()
    bare.first = KnownGradient(0, 2)
    model = front.shard(bare)
    model(scaled(world, 3.0), "first", "third").backward()
    assert model.second.weight.grad is None
    assert model.third.weight.grad.full_tensor().unique().tolist() == [3.0]


def test_decay_and_momentum_leave_a_parameter_alone_that_no_rank_used(world, front):
    model = front.shard(Three())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(scaled(world, 1.0), "first", "second", "third").backward()
    optimizer.step()
    optimizer.zero_grad()
    before = model.second.weight.full_tensor()
    model(scaled(world, 1.0), "first", "third").backward()
    optimizer.step()
    assert torch.equal(model.second.weight.full_tensor(), before)


def test_what_one_of_two_microbatches_used_has_its_gradient(world, front):
    model = front.shard(Three())
    model.set_requires_gradient_sync(False)
    model(scaled(world, 1.0), "first").backward()
    model.set_requires_gradient_sync(True)
    model(scaled(world, 4.0), "second").backward()
    assert gradients(model) == {"first": 1.0, "second": 4.0, "third": None}


@pytest.mark.ranks(2, 3)
def test_gradients_of_frozen_parameters_do_not_travel(world, front, collectives):
    """pytorch's test_fully_shard_frozen.py counts the same."""
    bare = Three((6, 5))
    bare.second.requires_grad_(False)
    model = front.shard(bare)
    model(scaled(world, 1.0), "first", "second", "third").backward()
    assert gradients(model) == {"first": 1.0, "second": None, "third": 1.0}
    assert [e.nbytes for e in front.engine.traffic(collectives).reductions] == [2 * 6 * 5 * 4], collectives


@POLICIES
def test_a_hook_on_a_gradient_is_called_once_when_it_is_reduced(world, front, policy):
    model, seen = front.shard(Three(), **front.precision(*policy)), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p is parameters[name], p.grad.full_tensor()[0, 0].item()))
        )
    parameters = dict(model.named_parameters())
    model.set_requires_gradient_sync(False)
    model(scaled(world, 1.0), "first", "third").backward()
    assert seen == []
    model.set_requires_gradient_sync(True)
    model(scaled(world, 2.0), "first", "third").backward()
    assert sorted(seen) == [("first.weight", True, 3.0), ("third.weight", True, 3.0)]


class Branches(nn.Module):
    """Layers side by side, with frozen biases: no gradient at their input shows that backward is done."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        for layer in layers:
            layer.bias.requires_grad_(False)

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("is_kept", [False, True], ids=["resharded", "kept"])
@pytest.mark.parametrize("kind", [nn.Sequential, Branches])
def test_an_optimizer_in_backward_trains_as_one_after_it(world, front, is_kept, kind):
    torch.manual_seed(world.seed)
    model = kind(*(nn.Linear(4, 4) for _ in range(3))).to(world.device)
    bare = copy.deepcopy(model)
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        front(layer)
    front(model)
    model.set_reshard_after_backward(not is_kept)
    optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in model.parameters() if p.requires_grad}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    reference = torch.optim.Adam(bare.parameters(), lr=0.1)
    for seed in range(3):
        batches = torch.randn(3 * world.size, 4, generator=torch.Generator().manual_seed(seed))
        batches = batches.to(world.device)
        bare(batches).sum(1).mean().backward()
        reference.step()
        reference.zero_grad()
        model(batches.chunk(world.size)[world.rank]).sum(1).mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model(batches), bare(batches))
