"""Buffers that only units without parameters hold.

After PyTorch's test/distributed/fsdp/test_fsdp_mixed_precision.py, the test of a root without parameters.
"""

import copy

import pytest
import torch
from torch import nn

from lockstep.assertions import (
    Training,
    assert_parity,
    train,
    unsharded_with_casts,
)
from lockstep.conformance import Precision, trainee
from lockstep.recorders import ForwardDtypes

F16, F32 = torch.float16, torch.float32


class Scale(nn.Module):
    """Multiply by numbers that are not learned."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.rand(width))

    def forward(self, x):
        return x * self.scale


def layers_and_buffers():
    """Return a model whose units hold parameters and buffers in turn, and whose root holds neither."""
    layers = nn.Linear(4, 8), Scale(8), nn.Linear(8, 4), Scale(4)
    return nn.Sequential(*map(nn.Sequential, layers))


@pytest.mark.ranks(2)
@pytest.mark.inside
class TestFSDPMixedPrecisionSharded:
    def test_buffer_dtype_no_root_handle(self, world, engine, shard, batches):
        bare = layers_and_buffers().to(world.device)
        originals = {name: buffer.clone() for name, buffer in bare.named_buffers()}
        inputs = batches(lambda generator: torch.randn(3, 4, generator=generator))
        training = Training(inputs, lambda m, x: m(x).mean(), tolerance=F16)
        learned = train(unsharded_with_casts(copy.deepcopy(bare), F16, F32, F16), training)
        log = ForwardDtypes(bare)
        model = shard(bare, units=("0", "1", "2", "3"), precision=Precision(F16, F32, F16))
        assert [group.name for group in engine.groups(model)] == ["0", "2"]
        with log:
            assert_parity(learned, trainee(engine, model), training)
        for name in ("1.0", "3.0"):
            assert (log.inputs(name), log.buffers(name)) == ({F16}, {F16})
        for buffer, (name, original) in zip(model.buffers(), originals.items(), strict=True):
            assert torch.equal(buffer, original.half()), name
