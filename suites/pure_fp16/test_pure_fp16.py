"""Models entirely in fp16: converted before or after they are sharded.

After PyTorch's test/distributed/fsdp/test_fsdp_pure_fp16.py.
"""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.assertions import (
    Trainee,
    Training,
    assert_gradient_dtypes,
    assert_parameter_dtypes,
    assert_parity,
    per_rank_batches,
)
from lockstep.conformance import Capability, Precision, ShardSpec, offers, trainee
from lockstep.conformance.models import NestedWrappedModule

HALF = torch.float16

PRECISIONS = [
    Precision(),
    Precision(param_dtype=HALF, reduce_dtype=torch.float32),
    Precision(param_dtype=torch.float32),
]


def model_from(seed):
    torch.manual_seed(seed)
    return NestedWrappedModule()


def half_batches(world):
    make = per_rank_batches(NestedWrappedModule.batch, world.seed, world.rank)
    return lambda step: make(step).to(world.device, HALF)


def loss_of(model, batch):
    return NestedWrappedModule.loss(model(batch))


def gradients_of(ddp):
    return {name: parameter.grad for name, parameter in ddp.module.named_parameters()}


@pytest.mark.ranks(2)
class TestPureFP16:
    def test_pure_fp16_training(self, world, engine, offload):
        reference = DistributedDataParallel(model_from(world.seed).to(world.device).half())
        spec = ShardSpec(units=NestedWrappedModule.units, offload=offload, device=world.device)
        sharded = engine.shard(model_from(world.seed), spec).half()
        assert_parity(
            Trainee(reference, full_gradients=gradients_of),
            trainee(engine, sharded),
            Training(half_batches(world), loss_of, steps=1, tolerance=HALF),
        )

    def test_fp16_dtypes(self, world, engine, run_subtests):
        settings = {
            "half_before_sharding": [True, False],
            "use_orig_params": [False, True],
            "precision": PRECISIONS,
            "offload": [False, True],
        }
        run_subtests(settings, self.check_dtypes, world, engine)

    def check_dtypes(self, world, engine, half_before_sharding, use_orig_params, precision, offload):
        model = model_from(world.seed)
        spec = ShardSpec(
            units=NestedWrappedModule.units,
            use_orig_params=use_orig_params,
            precision=precision,
            offload=offload,
            device=world.device,
        )
        sharded = engine.shard(model.half() if half_before_sharding else model, spec)
        sharded = sharded if half_before_sharding else sharded.half()
        assert_parameter_dtypes(sharded, HALF)
        engine.backward(sharded, loss_of(sharded, half_batches(world)(0)))
        assert_visible_half(sharded)
        assert_full_gradients_half(engine.full_gradients(sharded))
        if offers(engine, Capability.GROUPS):
            assert_group_dtypes(engine.groups(sharded), precision)


def assert_visible_half(sharded: nn.Module):
    """Every parameter is fp16, and so is the gradient of each that has elements on this rank."""
    assert_parameter_dtypes(sharded, HALF)
    assert_gradient_dtypes(sharded, HALF)
    for name, parameter in sharded.named_parameters():
        assert (parameter.grad is None) == (parameter.numel() == 0), name


def assert_group_dtypes(groups, precision: Precision):
    assert [group.name for group in groups] == ["", "module.1", "module.1.0", "module.2"]
    for group in groups:
        assert (group.flat_dtype, group.gradient_dtype, group.original_dtype) == (HALF, HALF, HALF)
        assert group.compute_dtype == (precision.param_dtype or HALF)
        assert group.reduce_dtype == (precision.reduce_dtype or precision.param_dtype or HALF)


def assert_full_gradients_half(gradients):
    """Every parameter has a gradient of its full shape that is fp16, finite and not all zero."""
    assert {name: gradient.shape for name, gradient in gradients.items()} == {
        name: parameter.shape for name, parameter in NestedWrappedModule().named_parameters()
    }
    for name, gradient in gradients.items():
        assert gradient.dtype == HALF, name
        assert gradient.isfinite().all(), name
        assert gradient.any(), name
