"""What an exception in forward or backward leaves behind, and what the user does next."""

import gc
import weakref

import pytest
import torch
from torch import nn

from harness.engine import CPUOffload, FullyShardedDataParallel, ModuleWrapPolicy, ShardingStrategy, groups

pytestmark = pytest.mark.ranks(2)

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fails = ""

    def forward(self, x):
        if self.fails == "forward":
            raise ValueError("planted in forward")
        x = self.linear(x)
        if self.fails == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, _):
        raise ValueError("planted in backward")


def failing_model(world, **arguments):
    """Return a model of three units, and the module in its middle that is to fail."""
    failing = Failing()
    bare = nn.Sequential(nn.Linear(8, 8), failing, nn.Linear(8, 8)).to(world.device)
    return FullyShardedDataParallel(
        bare, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments
    ), failing


def fail_in_backward(model, failing, world):
    failing.fails = "backward"
    with pytest.raises(ValueError, match="planted in backward"):
        model(batch(world)).sum().backward()
    failing.fails = ""


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def batch(world):
    return torch.ones(2, 8, device=world.device) * (world.rank + 1)


@EVERY_STRATEGY
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_the_model_usable(world, strategy, where):
    model, failing = failing_model(world, sharding_strategy=strategy)
    model(batch(world)).sum().backward()
    expected = gradients(model)
    failing.fails = where
    with pytest.raises(ValueError, match=f"planted in {where}"):
        model(batch(world)).sum().backward()
    failing.fails = ""
    model.zero_grad()
    model(batch(world)).sum().backward()
    assert all(map(torch.equal, gradients(model), expected))


@EVERY_STRATEGY
def test_zero_grad_after_a_failed_backward_resets_all(world, strategy):
    model, failing = failing_model(world, sharding_strategy=strategy, use_orig_params=True)
    model(batch(world)).sum().backward()
    fail_in_backward(model, failing, world)
    model.zero_grad()
    assert (len(gradients(model)), set(gradients(model))) == (6, {None})


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_backward_after_a_failed_one_has_its_own_gradients(world, strategy, use_orig_params):
    model, failing = failing_model(world, sharding_strategy=strategy, use_orig_params=use_orig_params)
    model(batch(world)).sum().backward()
    expected = gradients(model)
    loss = model(batch(world)).sum()
    fail_in_backward(model, failing, world)
    model.zero_grad()
    loss.backward()
    found = gradients(model)
    assert all(f is e or torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_model_can_be_cast_after_a_failed_backward(world):
    model, failing = failing_model(world)
    fail_in_backward(model, failing, world)
    model.half()
    assert {group.flat_dtype for group in groups(model)} == {torch.float16}


def test_a_dropped_model_frees_its_memory_after_an_exception(world):
    model, failing = failing_model(world, use_orig_params=True)
    fail_in_backward(model, failing, world)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, failing
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 6


@pytest.mark.ranks(2, timeout=30)
def test_a_dropped_model_leaves_no_stale_collective(world):
    for value in (1.0, 2.0, 3.0):
        model, failing = failing_model(world, use_orig_params=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
            # y = 8 a x + a, three times
            expected = value * (1 + 8 * value * (1 + 8 * value * (1 + 8 * (world.rank + 1))))
            assert model(batch(world))[0, 0].item() == expected
        fail_in_backward(model, failing, world)
        del model, failing
        gc.collect()


def test_a_parameter_in_a_traceback_can_be_printed(world):
    class Holding(nn.Linear):
        def forward(self, _):
            weight = self.weight
            raise ValueError(f"holds {weight.numel()} elements")

    model = FullyShardedDataParallel(Holding(8, 8).to(world.device), cpu_offload=CPUOffload(True))
    with pytest.raises(ValueError, match="holds 64 elements") as caught:
        model(batch(world))
    weight = caught.traceback[-1].frame.f_locals["weight"]
    assert "requires_grad=True" in repr(weight)
    assert [group.state.name for group in groups(model)] == ["RETAINED"]
