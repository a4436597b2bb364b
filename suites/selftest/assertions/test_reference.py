"""The unsharded reference that makes the casts of mixed precision."""

import pytest
import torch
from torch import nn

from lockstep.assertions import unsharded_with_casts
from lockstep.conformance.models import (
    BatchNormNet,
    KnownGradient,
    LinearMixedPrecision,
    TransformerWithSharedParams,
)
from lockstep.recorders import ForwardDtypes

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64, I64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64


def test_forward_meets_the_casts_and_the_model_keeps_its_dtypes(world):
    bare = LinearMixedPrecision(F32).to(world.device)
    reference = unsharded_with_casts(bare, F16, buffer_dtype=BF16)
    with ForwardDtypes(bare) as log:
        output = reference.model(torch.ones(2, 10, device=world.device))
    assert (log.inputs(""), log.parameters("lin"), log.buffers("")) == ({F16}, {F16}, {BF16})
    assert (output.dtype, bare.lin.weight.dtype, bare.buffer.dtype) == (F16, F32, F64)


@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "mean"),
    [(F16, F32, 1 + 2**-11), (F16, None, 1), (None, F16, 1), (None, None, 1 + 2**-11)],
)
def test_gradients_are_means_rounded_to_the_reduce_dtype(world, param_dtype, reduce_dtype, mean):
    bare = KnownGradient(3).to(world.device)
    reference = unsharded_with_casts(bare, param_dtype, reduce_dtype)
    for _ in range(2):  # the second takes the place of the first
        # 1 + 2^-10 is an fp16 number; the mean with 1 needs one bit more.
        loss = reference.model(torch.tensor(1 + world.rank * 2**-10, device=world.device))
        reference.backward(reference.model, loss)
        assert reference.full_gradients(reference.model)["weight"].tolist() == [mean] * 3
        assert bare.weight.grad.dtype == F32


def test_gradients_of_a_wider_dtype_are_averaged_before_rounding(world):
    bare = KnownGradient(3).to(world.device, BF16)
    reference = unsharded_with_casts(bare, F32)
    # Either rounds to 1 in bf16; their mean does not.
    gradient = torch.tensor([1 + 2**-9, 1 + 2**-7][world.rank] + 2**-9, device=world.device)
    reference.backward(reference.model, reference.model(gradient))
    assert bare.weight.grad.dtype == BF16
    assert bare.weight.grad.tolist() == [1 + 2**-7] * 3


def test_classes_in_full_precision_are_not_cast_nor_rounded(world):
    bare = BatchNormNet().to(world.device)
    reference = unsharded_with_casts(bare, F16, None, F16, (nn.BatchNorm1d,))
    with ForwardDtypes(bare) as log:
        output = reference.model(torch.randn(3, 2, device=world.device))
        reference.backward(reference.model, output.square().sum())
    assert (log.inputs("bn"), log.parameters("bn"), log.buffers("bn")) == ({F32}, {F32}, {F32})
    assert log.inputs("fc2") == log.inputs("ln") == log.parameters("ln") == {F16}
    gradients = reference.full_gradients(reference.model)
    assert not torch.equal(gradients["bn.bias"], gradients["bn.bias"].half().float())
    assert torch.equal(gradients["ln.bias"], gradients["ln.bias"].half().float())


def test_tied_weights_stay_tied_and_integers_stay_integers(world):
    bare = TransformerWithSharedParams().to(world.device)
    reference = unsharded_with_casts(bare, F16, buffer_dtype=F16)
    src, tgt = torch.zeros(6, 2, dtype=I64), torch.ones(4, 2, dtype=I64)
    with ForwardDtypes(bare) as log:
        output = reference.model(src.to(world.device), tgt.to(world.device))
    reference.backward(reference.model, bare.loss(output, tgt.to(world.device)))
    (call,) = log.calls("")
    assert (set(call.inputs.values()), call.buffers) == ({I64}, {"vocab_bias": F16, "long_buffer": I64})
    # The projection distinguishes all words, the embedding reads two of them.
    assert bare.embed_tokens.weight.grad.any(dim=1).all()
