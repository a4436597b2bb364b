"""Exceptions in forward and backward: the state of the model afterwards, and the failure report."""

import gc
import weakref

import pytest
import torch
from torch import nn

from lockstep.engine import (
    CPUOffload,
    FullyShardedDataParallel,
    ModuleWrapPolicy,
    ShardingStrategy,
    fully_shard,
    groups,
)

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
    """Return a model of three units, and the module in its middle, which can fail."""
    failing = Failing()
    bare = nn.Sequential(nn.Linear(8, 8), failing, nn.Linear(8, 8)).to(world.device)
    return FullyShardedDataParallel(
        bare, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **arguments
    ), failing


def fail_in_backward(model, failing, batch):
    failing.fails = "backward"
    with pytest.raises(ValueError, match="planted in backward"):
        model(batch).sum().backward()
    failing.fails = ""


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@EVERY_STRATEGY
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_the_model_usable(world, batch, strategy, where):
    model, failing = failing_model(world, sharding_strategy=strategy)
    model(batch).sum().backward()
    expected = gradients(model)
    failing.fails = where
    with pytest.raises(ValueError, match=f"planted in {where}"):
        model(batch).sum().backward()
    failing.fails = ""
    model.zero_grad()
    model(batch).sum().backward()
    assert all(map(torch.equal, gradients(model), expected))


@EVERY_STRATEGY
def test_zero_grad_after_a_failed_backward_resets_all(world, batch, strategy):
    model, failing = failing_model(world, sharding_strategy=strategy, use_orig_params=True)
    model(batch).sum().backward()
    fail_in_backward(model, failing, batch)
    model.zero_grad()
    assert (len(gradients(model)), set(gradients(model))) == (6, {None})


@EVERY_STRATEGY
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_backward_after_a_failed_one_has_its_own_gradients(world, batch, strategy, use_orig_params):
    model, failing = failing_model(world, sharding_strategy=strategy, use_orig_params=use_orig_params)
    model(batch).sum().backward()
    expected = gradients(model)
    loss = model(batch).sum()
    fail_in_backward(model, failing, batch)
    model.zero_grad()
    loss.backward()
    found = gradients(model)
    assert all(f is e or torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_model_can_be_cast_after_a_failed_backward(world, batch):
    model, failing = failing_model(world)
    fail_in_backward(model, failing, batch)
    model.half()
    assert {group.flat_dtype for group in groups(model)} == {torch.float16}


def test_a_dropped_model_frees_its_memory_after_an_exception(world, batch):
    model, failing = failing_model(world, use_orig_params=True)
    fail_in_backward(model, failing, batch)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, failing
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * 6


@pytest.mark.ranks(2, timeout=30)
def test_a_dropped_model_leaves_no_stale_collective(world, batch):
    for value in (1.0, 2.0, 3.0):
        model, failing = failing_model(world, use_orig_params=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
            x = torch.full((2, 8), world.rank + 1.0, device=world.device)
            # y = 8 a x + a, three times
            expected = value * (1 + 8 * value * (1 + 8 * value * (1 + 8 * (world.rank + 1))))
            assert model(x)[0, 0].item() == expected
        fail_in_backward(model, failing, batch)
        del model, failing
        gc.collect()


def test_a_parameter_in_a_traceback_can_be_printed(world, batch):
    class Holding(nn.Linear):
        def forward(self, _):
            weight = self.weight
            raise ValueError(f"holds {weight.numel()} elements")

    model = FullyShardedDataParallel(Holding(8, 8).to(world.device), cpu_offload=CPUOffload(True))
    with pytest.raises(ValueError, match="holds 64 elements") as caught:
        model(batch)
    weight = caught.traceback[-1].frame.f_locals["weight"]
    assert "requires_grad=True" in repr(weight)
    assert [group.state.name for group in groups(model)] == ["RETAINED"]


@pytest.mark.parametrize("front", [fully_shard, FullyShardedDataParallel])
def test_a_failure_report_reads_no_freed_memory(world, request, monkeypatch, front):
    monkeypatch.delenv("LOCKSTEP_ENGINE_DEBUG", raising=False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(world.device)
    inner = front(model[0])
    outer = front(nn.Sequential(inner, model[1]))
    with pytest.raises(NotImplementedError) as caught:
        outer(torch.ones(2, 4, device=world.device)).sum().backward(create_graph=True)
    report = str(request.node.repr_failure(caught))  # where it reads such memory, it ends the rank
    assert "\nfull = UnshardedParams(dtypes=" in report  # it shows what functions were given
    assert "E           NotImplementedError: backward with create_graph=True is not built" in report
