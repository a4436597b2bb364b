"""Gradients in low precision: of parameters, where they are kept, and of inputs that were cast.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the tests of gradients.
"""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    assert_gradient_dtypes,
    assert_named_close,
    assert_parameter_dtypes,
    named_gradients,
    unsharded_with_casts,
)
from lockstep.conformance import Precision, ShardSpec

F16, F32 = torch.float16, torch.float32
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


def own_batch(world, step=0):
    generator = torch.Generator().manual_seed(world.size * step + world.rank)
    return torch.randn(4, 10, generator=generator).to(world.device)


def check_kept_gradients(world, engine, **settings):
    """Six backwards add up, in fp16, what the same model gives unsharded."""
    bare = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)).to(world.device)
    unsharded = copy.deepcopy(bare)
    reference = unsharded_with_casts(unsharded, F16)
    precision = Precision(F16, F16, F16, keep_low_precision_grads=True)
    spec = ShardSpec(units=("0",), precision=precision, device=world.device, **settings)
    model = engine.shard(bare, spec)
    expected = {name: torch.zeros_like(p, dtype=F16) for name, p in unsharded.named_parameters()}
    for step in range(6):
        engine.backward(model, model(own_batch(world, step)).sum())
        assert_gradient_dtypes(model, F16)
        assert_parameter_dtypes(model, F32)
        unsharded.zero_grad()
        reference.backward(unsharded, reference.model(own_batch(world, step)).sum())
        for name, gradient in named_gradients(unsharded).items():
            expected[name] += gradient.half()
        assert_named_close(engine.full_gradients(model), expected, F16)


def check_input_gradient(world, engine, strategy, use_orig_params):
    bare = nn.Linear(10, 10, bias=False).to(world.device)
    weight = bare.weight.detach().half()
    spec = ShardSpec(strategy, Precision(F16, F32), use_orig_params=use_orig_params, device=world.device)
    model = engine.shard(bare, spec)
    x = own_batch(world).requires_grad_()
    engine.backward(model, model(x).square().sum())
    reference = own_batch(world).requires_grad_()
    nn.functional.linear(reference.half(), weight).square().sum().backward()
    assert x.grad.dtype == F32
    assert_named_close({"x": x.grad}, {"x": reference.grad}, F16)


KEPT = {"offload": [False, True], "use_orig_params": [False, True]}


@pytest.mark.ranks(2)
class TestFSDPMixedPrecisionSharded:
    def test_grads_reduced_precision(self, world, engine, run_subtests):
        run_subtests(KEPT, check_kept_gradients, world, engine)

    def test_input_grads_with_param_mixed_precision(self, world, engine, run_subtests):
        settings = {"strategy": STRATEGIES, "use_orig_params": [False, True]}
        run_subtests(settings, check_input_gradient, world, engine)


@pytest.mark.ranks(1)
class TestFSDPMixedPrecisionUnsharded:
    def test_grads_reduced_precision(self, world, engine, run_subtests):
        run_subtests(KEPT, check_kept_gradients, world, engine)
