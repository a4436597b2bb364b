"""All-gathers of the engine: their order, prefetches, memory, and the buffer pool."""

import pytest
import torch
from torch import nn

from lockstep.assertions import assert_named_close
from lockstep.conformance import Precision, ShardSpec
from lockstep.conformance.models import KnownGradient
from lockstep.engine import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    GroupState,
    ModuleWrapPolicy,
    groups,
)
from lockstep.engine.collectives import BufferPool

pytestmark = pytest.mark.ranks(2)

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


class Layers(nn.Module):
    """Linear layers in a row, of which `order` lists those that run."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.order = range(num_layers)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def sharded(world, **arguments):
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(Layers().to(world.device), auto_wrap_policy=policy, **arguments)


def states(model):
    return "".join(group.state.name[0] for group in groups(model))


def states_in_forward(model, world):
    """Return the states of all layers as each one begins its forward."""
    seen = []
    hooks = [
        unit.module.register_forward_pre_hook(lambda *_: seen.append(states(model))) for unit in model.layers
    ]
    model(batch(world))
    for hook in hooks:
        hook.remove()
    return seen


def states_in_backward(model, world):
    """Return the states of all layers as backward reaches each one, and as it computes."""
    seen = []

    def watch(module, _, output):
        output.register_hook(lambda _: seen[-1].append(states(model)))
        # The unit's own hook stands on what it returns, and runs after this one.
        returned = output.view_as(output)
        returned.register_hook(lambda _: seen.append([states(model)]))
        return returned

    hooks = [unit.module.register_forward_hook(watch) for unit in model.layers]
    model(batch(world)).sum().backward()
    for hook in hooks:
        hook.remove()
    return [tuple(pair) for pair in seen]


def batch(world):
    return torch.ones(2, 4, device=world.device)


# S: sharded, P: prefetched, U: unsharded


@pytest.mark.parametrize(
    ("forward_prefetch", "second"),
    [(False, ["USSS", "SUSS", "SSUS", "SSSU"]), (True, ["UPSS", "SUPS", "SSUP", "SSSU"])],
)
def test_forward_prefetches_one_group_once_the_order_is_known(world, forward_prefetch, second):
    model = sharded(world, forward_prefetch=forward_prefetch)
    assert states_in_forward(model, world) == ["USSS", "SUSS", "SSUS", "SSSU"]
    assert states_in_forward(model, world) == second


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (None, [("SSSS", "SSSU"), ("SSSS", "SSUS"), ("SSSS", "SUSS"), ("SSSS", "USSS")]),
        (PRE, [("SSSS", "SSPU"), ("SSPS", "SPUS"), ("SPSS", "PUSS"), ("PSSS", "USSS")]),
        (POST, [("SSSS", "SSSU"), ("SSPS", "SSUS"), ("SPSS", "SUSS"), ("PSSS", "USSS")]),
    ],
)
def test_backward_prefetches_one_group_before_or_after_computing(world, prefetch, expected):
    assert states_in_backward(sharded(world, backward_prefetch=prefetch), world) == expected


@pytest.mark.parametrize("prefetch", [None, PRE, POST])
@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_prefetch_adds_no_gather(world, engine, collectives, prefetch, forward_prefetch):
    model = sharded(world, backward_prefetch=prefetch, forward_prefetch=forward_prefetch)
    for _ in range(2):
        model(batch(world)).sum().backward()
    traffic = engine.traffic(collectives)
    assert (len(traffic.gathers), len(traffic.reductions), traffic.others) == (2 * 8, 2 * 4, ())


def test_a_wrong_guess_costs_gathers_and_leaves_nothing_behind(world, engine, collectives):
    bare = Layers().to(world.device)
    spec = ShardSpec(units=(nn.Linear,), forward_prefetch=True, sync_module_states=True)
    reference = Layers().to(world.device)
    model = engine.shard(bare, spec)
    reference.load_state_dict(engine.full_parameters(model))
    for order in ([0, 1, 2, 3], [3, 0, 2], [1, 1, 2], [0, 1, 2, 3]):
        bare.order = reference.order = order
        for module in (model, reference):
            module.zero_grad()
            module(batch(world)).square().sum().backward()
        gradients = {name: p.grad for name, p in reference.named_parameters()}
        assert_named_close(engine.full_gradients(model), gradients)
        assert [(g.state, g.gathered_bytes) for g in groups(model)] == [(GroupState.SHARDED, 0)] * 4
    assert len(engine.traffic(collectives).gathers) > 2 * (4 + 3 + 2 + 4)


def test_a_prefetch_of_one_evaluation_is_not_stale_in_the_next(world):
    model = sharded(world, forward_prefetch=True, use_orig_params=True)
    outputs = []
    for value in (1.0, 2.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
            outputs.append(model(batch(world))[0, 0].item())
    # y = 4 a x + a, four times: 4 a, from x = 1.
    assert outputs == [sum(4.0**i for i in range(4)) + 4.0**4, sum(2 * 8.0**i for i in range(4)) + 8.0**4]


@pytest.mark.parametrize(("prefetch", "most"), [(None, 1), (PRE, 2), (POST, 1)])
def test_few_groups_are_unsharded_while_gradients_are_computed(world, prefetch, most):
    model = sharded(world, backward_prefetch=prefetch)
    num_gathered = [4 - computing.count("S") for _, computing in states_in_backward(model, world)]
    assert max(num_gathered) == most


@pytest.mark.ranks(3)
def test_gloo_reductions_add_in_rank_order_in_fp32(world):
    # In fp64, or with the large ones added first, the 1 would survive: 1e8 + 1 is no fp32 number.
    numel = 200_000  # more than one chunk of the sum
    model = FullyShardedDataParallel(KnownGradient(numel).to(world.device))
    model(torch.full((numel,), (1e8, 1.0, -1e8)[world.rank], device=world.device)).backward()
    assert not model.flat_param.grad.any()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_alternating_modes_keep_one_dtype_in_memory(world, engine, strategy):
    spec = ShardSpec(strategy, Precision(torch.bfloat16), units=(nn.Linear,), full_precision_in_eval=True)
    model = engine.shard(Layers().to(world.device), spec)
    kept = 0 if strategy == "FULL_SHARD" else 4 * 20
    for train, itemsize in ((True, 2), (False, 4), (True, 2)):
        loss = model.train(train)(batch(world)).float().sum()
        # Where nothing is sharded or cast modules read the shard itself.
        assert sum(group.gathered_bytes for group in engine.groups(model)) == kept * itemsize
    model.eval()(batch(world))
    loss.backward()
    assert [group.gathered_bytes for group in engine.groups(model)] == [0] * 4


# the pool


@pytest.mark.ranks(1)
def test_a_pool_reuses_returned_buffers_that_fit(world):
    pool = BufferPool()
    first = pool.take(8, torch.float32, torch.device("cpu"))
    address = first.data_ptr()
    assert pool.take_like(first).data_ptr() != address
    pool.give(first)
    assert pool.take(8, torch.float16, torch.device("cpu")).data_ptr() != address
    smaller = pool.take(5, torch.float32, torch.device("cpu"))
    assert (smaller.data_ptr(), smaller.shape) == (address, (5,))
    pool.give(smaller)
    assert pool.take(8, torch.float32, torch.device("cpu")).data_ptr() == address
