"""A gradient scaler of sharded gradients: all ranks scale, unscale, skip and back off together.

After PyTorch's test/distributed/fsdp/test_fsdp_sharded_grad_scaler.py.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import (
    Trainee,
    Training,
    assert_named_close,
    assert_parity,
    local_part,
    named_gradients,
    named_parameters,
    per_rank_batches,
)
from lockstep.assertions.closeness import EXACT, Tolerance
from lockstep.conformance import Precision, ShardSpec, trainee
from lockstep.conformance.models import (
    InHalf,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
)

HALF = torch.float16
IN_HALF = Precision(HALF, HALF, HALF)
INF = float("inf")


class Reporting(torch.optim.SGD):
    """SGD whose step returns that it was taken."""

    def step(self):
        super().step()
        return "stepped"


def sparse(indices, values):
    """Return a sparse vector of three elements."""
    with torch.sparse.check_sparse_tensor_invariants():  # its argument of that name warns in torch 2.11
        return torch.sparse_coo_tensor([indices], values, (3,))


@pytest.fixture
def scaler(engine, group_of_one):
    """A scaler whose scale is 4."""
    return engine.grad_scaler(nn.Linear(1, 1), init_scale=4.0, process_group=group_of_one)


@pytest.fixture
def weight(scaler):
    """A parameter of three zeros, after the loss of the step has been scaled."""
    scaler.scale(torch.zeros(()))
    return nn.Parameter(torch.zeros(3))


class TestShardGradScaler:
    @pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float32, torch.float64])
    def test_grad_scaling(self, scaler, dtype):
        one, two = torch.tensor(1.5, dtype=dtype), torch.tensor([-2.0, 0.25], dtype=dtype)
        for outputs in (one, two, (one, two), [one, two], [one, (two, [one])]):
            expected = torch.utils._pytree.tree_map(lambda t: (t * 4).to(dtype), outputs)
            torch.testing.assert_close(scaler.scale(outputs), expected, rtol=0, atol=0)
        assert scaler._get_scale_async().device == one.device

    @pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float32])
    def test_scaling_unscaling_sparse(self, scaler, weight, dtype):
        weight.data = weight.data.to(dtype)
        weight.grad = sparse([2, 0, 2], torch.tensor([8.0, 6.0, 4.0], dtype=dtype))
        optimizer = Reporting([weight], lr=1.0)
        scaler.unscale_(optimizer)
        assert (weight.grad.layout, weight.grad.dtype) == (torch.sparse_coo, dtype)
        assert weight.grad.to_dense().tolist() == [1.5, 0.0, 3.0]
        assert scaler.step(optimizer) == "stepped"
        assert weight.tolist() == [-1.5, 0.0, -3.0]

    @pytest.mark.parametrize("bad", [[1.0, INF], [1.0, float("nan")], [60000.0, 60000.0]], ids=str)
    def test_scaling_unscaling_sparse_finds_inf(self, scaler, weight, bad):
        # Each 60000 is finite in fp16, and their sum, which stands in the gradient once, is not.
        weight.data = weight.data.to(HALF)
        weight.grad = sparse([1, 1], torch.tensor(bad, dtype=HALF))
        assert scaler.step(Reporting([weight], lr=1.0)) is None
        scaler.update()
        assert (weight.tolist(), scaler.get_scale()) == ([0.0] * 3, 2.0)

    @pytest.mark.parametrize("unscale_first", [False, True])
    @pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
    def test_inf_gradients_skip_optim_step(self, scaler, weight, bad, unscale_first):
        optimizer = Reporting([weight], lr=1.0)
        weight.grad = torch.tensor([4.0, bad, 4.0])
        if unscale_first:
            scaler.unscale_(optimizer)
        assert scaler.step(optimizer) is None
        scaler.update()
        assert (weight.tolist(), scaler.get_scale()) == ([0.0] * 3, 2.0)
        weight.grad = torch.tensor([4.0, 2.0, 8.0])
        assert scaler.step(optimizer) == "stepped"
        assert weight.tolist() == [-2.0, -1.0, -4.0]


def ddp(world, bare, precision):
    """Return `bare` under DDP; where `precision` is fp16, so are forward, backward and the wire."""
    model = DistributedDataParallel(InHalf(bare) if precision == IN_HALF else bare)
    if precision == IN_HALF:
        model.register_comm_hook(None, fp16_compress_hook)
    scaler = torch.amp.GradScaler(world.device.type, init_scale=64.0, growth_interval=2)
    return Trainee(model, lambda _: named_parameters(bare), lambda _: named_gradients(bare), scaler=scaler)


def nested_loss(model, batch):
    return NestedWrappedModule.loss(model(batch))


@pytest.mark.ranks(2, 3)
class TestShardedGradScalerParityWithDDP:
    @pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "FULL_SHARD"])
    def test_fsdp_ddp_parity_with_grad_scaler(self, world, engine, batches, run_subtests, strategy, offload):
        # Two ranks: a sum of more fp16 numbers that DDP rounds as it goes is not one that is rounded once.
        precisions = [Precision(), IN_HALF] if world.size == 2 else [Precision()]
        settings = {"precision": precisions, "use_orig_params": [False, True]}
        more = {"strategy": strategy, "offload": offload}
        run_subtests(settings, self.check_parity, world, engine, batches, **more)

    def check_parity(self, world, engine, batches, precision, **settings):
        bare = (NonUniformReqGradNWM if settings["use_orig_params"] else NestedWrappedModule)()
        reference = ddp(world, copy.deepcopy(bare).to(world.device), precision)
        spec = ShardSpec(units=bare.units, precision=precision, device=world.device, **settings)
        model = engine.shard(bare, spec)
        scaler = engine.grad_scaler(model, init_scale=64.0, growth_interval=2)
        candidate = trainee(engine, model, scaler=scaler)
        training = Training(batches(bare.batch), nested_loss, tolerance=precision.param_dtype)
        assert_parity(reference, candidate, training)
        assert scaler.get_scale() == reference.scaler.get_scale() == 128.0

    def test_sharded_grad_scaler_found_inf(self, world, engine, use_orig_params, offload):
        torch.manual_seed(world.seed)
        bare = TransformerWithSharedParams()
        reference = DistributedDataParallel(copy.deepcopy(bare).to(world.device))
        spec = {"use_orig_params": use_orig_params, "offload": offload, "device": world.device}
        model = engine.shard(bare, ShardSpec(units=bare.units, **spec))
        runs = [
            Trainee(reference, scaler=torch.amp.GradScaler(world.device.type, init_scale=2.0**10)),
            trainee(engine, model, scaler=engine.grad_scaler(model, init_scale=2.0**10)),
        ]
        sgd = partial(torch.optim.SGD, lr=0.01)
        optimizers = [sgd(reference.parameters()), engine.optimizer(model, sgd)]
        # Engines round a third at different places, which ten steps amplify: to 1.6e-6, by engine and CPU.
        tolerance = Tolerance(1e-5, 1e-5) if world.size == 3 else None
        for number in range(10):
            found = [
                overflowing_step(world, number, run, optimizer)
                for run, optimizer in zip(runs, optimizers, strict=True)
            ]
            assert_named_close({"loss": found[1]}, {"loss": found[0]}, tolerance)
        assert_named_close(engine.full_parameters(model), named_parameters(reference))


def overflowing_step(world, number, run, optimizer):
    """Train a step, and assert that parameters and scale do what they should; return the scaled loss.

    Every second step has an inf: of the sharded model in a gradient of rank 0 only, of DDP on every rank.
    """
    model, scaler = run.model, run.scaler
    before, scale = copied(run.full_parameters(model)), scaler.get_scale()
    optimizer.zero_grad()
    loss = scaled_loss(world, number, model, scaler)
    run.backward(model, loss)
    overflow = number % 2 == 0
    if overflow and (world.rank == 0 or isinstance(model, DistributedDataParallel)):
        gradient = next(p.grad for p in model.parameters() if p.grad is not None)
        local_part(gradient).view(-1)[0] = INF
    scaler.step(optimizer)
    scaler.update()
    after = copied(run.full_parameters(model))
    if overflow:
        assert_named_close(after, before, EXACT)
    else:
        assert {name for name in before if torch.equal(after[name], before[name])} == set()
    assert scaler.get_scale() == (scale * 0.5 if overflow else scale)
    world.assert_same(scaler.get_scale())
    return loss.detach()


def scaled_loss(world, number, model, scaler):
    batch = per_rank_batches(TransformerWithSharedParams.batch, world.seed, world.rank)(number)
    src, tgt = (tensor.to(world.device) for tensor in batch)
    torch.manual_seed(number)  # the same dropout in both
    return scaler.scale(TransformerWithSharedParams.loss(model(src, tgt), tgt))


def copied(named):
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def test_without_ranks_to_agree_with_the_argument_that_names_some_is_asked_for(engine):
    bare = nn.Linear(1, 1)
    scaler = engine.grad_scaler(bare)
    engine.backward(bare, scaler.scale(bare.weight.sum()))
    with pytest.raises(RuntimeError, match="process_group"):
        scaler.unscale_(torch.optim.SGD([bare.weight]))
