"""Reduction of gradients under the composable fronts: divided by a chosen factor, stored in fp32."""

import copy

import pytest
import torch

from lockstep.conformance.models import KnownGradient, KnownGradients

pytestmark = pytest.mark.ranks(2)

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def known(world, front, *shape, **settings):
    return front(KnownGradient(*shape).to(world.device), **settings)


def gradient(model):
    return model.weight.grad.full_tensor().flatten().tolist()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize("reduce_dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
def test_a_divide_factor_divides_the_sum(world, front, factor, reduce_dtype):
    """torch 2.13 refuses most factors on gloo; pytorch#167178: one rank alone did not divide."""
    model = known(world, front, 3, **front.precision(reduce_dtype=reduce_dtype))
    model.set_gradient_divide_factor(factor)
    model(torch.tensor(6.0 * (1 + world.rank), device=world.device)).backward()
    assert gradient(model) == [6.0 * sum(range(1, world.size + 1)) / factor] * 3


def test_a_divide_factor_holds_for_its_group_alone(world, front):
    model = front.shard(KnownGradients(3), **front.precision(None, F16))
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


def test_gradients_are_stored_in_the_parameters_dtype(world, front):
    model = known(world, front, 3, **front.precision(F16))
    for number in range(1, 4):
        model(torch.tensor(2.0 * world.rank, device=world.device)).backward()
        assert (model.weight.dtype, model.weight.grad.dtype) == (F32, F32)
        assert gradient(model) == [1.0 * number] * 3
        assert model.weight.grad.placements == model.weight.placements
