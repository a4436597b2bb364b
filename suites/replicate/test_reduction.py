"""What the reduction makes of gradients: the exact mean over ranks, or the sum by a factor that is told."""

import copy

import pytest
import torch
from torch import nn

from harness.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def known(world, front, *shape, **settings):
    return front(KnownGradient(*shape).to(world.device), **settings)


def gradient(model):
    return model.weight.grad.full_tensor().flatten().tolist()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "policy",
    [(), (F16,), (BF16, F32), (None, F16)],
    ids=["fp32", "fp16", "bf16_reduced_in_fp32", "reduced_in_fp16"],
)
def test_gradients_are_the_mean_over_ranks(world, front, shape, policy):
    """pytorch#162338: gloo gave the sum; #144045: small ones were zero."""
    model = known(world, front, *shape, **front.precision(*policy))
    model(torch.tensor(6.0 * (1 + world.rank), device=world.device)).backward()
    assert gradient(model) == [3.0 * (world.size + 1)] * torch.Size(shape).numel()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("reduce_dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_a_factor_that_is_told_divides_the_sum(world, front, factor, reduce_dtype):
    """torch 2.13 refuses most factors on gloo; pytorch#167178: one rank alone did not divide."""
    model = known(world, front, 3, **front.precision(reduce_dtype=reduce_dtype))
    model.set_gradient_divide_factor(factor)
    model(torch.tensor(6.0 * (1 + world.rank), device=world.device)).backward()
    assert gradient(model) == [6.0 * sum(range(1, world.size + 1)) / factor] * 3


def test_a_factor_holds_for_the_group_that_is_told_alone(world, front):
    model = front.apply(
        KnownGradients(3).to(world.device), KnownGradients.units, **front.precision(None, F16)
    )
    model[1].set_gradient_divide_factor(1.0)
    model(torch.tensor(2.0 * (1 + world.rank), device=world.device)).backward()
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [
        [mean] * 3 for mean in (3.0, 6.0, 3.0, 3.0)
    ]


def test_a_copy_divides_as_its_original_and_leaves_that_alone(world, front):
    """torch 2.13 refuses to copy."""
    model = known(world, front, 3)
    model.set_gradient_divide_factor(3.0)
    copied = copy.deepcopy(model)
    copied(torch.tensor(6.0 * (1 + world.rank), device=world.device)).backward()
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert copied.weight.full_tensor().tolist() == [-6.0] * 3
    assert (model.weight.grad, model.weight.full_tensor().tolist()) == (None, [0.0] * 3)


def test_reduce_dtype_holds_for_every_bit_of_every_gradient(world, front):
    """pytorch#190626: some gradients were reduced in low precision and cast afterwards."""
    model = front.apply(KnownGradients(3).to(world.device), KnownGradients.units, **front.precision(F16, F32))
    # 1 + 2^-10 is an fp16 number; the mean with 1 needs one bit more.
    model(torch.tensor(1 + world.rank * 2**-10, device=world.device, dtype=F16)).backward()
    assert [p.grad.full_tensor().tolist() for p in model.parameters()] == [[1 + 2**-11] * 3] * 4


def test_fp64_gradients_are_summed_in_fp64(world, front):
    model = front(KnownGradient(3).double().to(world.device))
    model(torch.tensor(1 + world.rank * 2**-40, device=world.device, dtype=F64)).backward()
    assert gradient(model) == [1 + 2**-41] * 3


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=["fp16", "bf16"])
def test_low_precision_sums_are_rounded_once(world, front, dtype):
    """torch 2.13 leaves the sum to gloo, which rounds after each rank."""
    mine = torch.randn(50, generator=torch.Generator().manual_seed(world.rank)).to(dtype)
    model = front(KnownGradient(50).to(dtype).to(world.device))
    model(mine.to(world.device)).backward()
    exact = sum(world.gather(mine.double())) / world.size
    assert torch.equal(model.weight.grad.full_tensor().cpu(), exact.float().to(dtype))


def test_large_fp16_gradients_do_not_overflow_in_the_sum(world, front):
    model = known(world, front, 3, **front.precision(F16))
    model(torch.tensor(60000.0 + 64 * world.rank, device=world.device)).backward()
    assert gradient(model) == [60032.0] * 3


def test_gradients_are_stored_in_the_parameters_dtype(world, front):
    model = known(world, front, 3, **front.precision(F16))
    for number in range(1, 4):
        model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
        assert (model.weight.dtype, model.weight.grad.dtype) == (F32, F32)
        assert gradient(model) == [1.0 * number] * 3
        assert model.weight.grad.placements == model.weight.placements


def test_every_element_beside_a_large_parameter_has_its_gradient(world, front):
    """pytorch#144045: the gradient of a small parameter was zero on one rank."""

    class Uneven(nn.ModuleList):
        def forward(self, gradient):
            return torch.stack([module(gradient) for module in self]).sum()

    model = front(Uneven(KnownGradient(*shape) for shape in [(1,), (13,), (2, 3), (1, 1)]).to(world.device))
    model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
    assert [p.grad.full_tensor().flatten().tolist() for p in model.parameters()] == [
        [1.0] * n for n in (1, 13, 6, 1)
    ]
