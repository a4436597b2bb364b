"""Regions of tensor parallelism, as in Megatron-LM's tests/unit_tests/tensor_parallel/test_mappings.py.

Run by `pytest test_mappings.py`.
"""

import mappings
import pytest
import torch

pytestmark = pytest.mark.ranks(2)


def test_scatter(world):
    tensor = torch.arange(8.0).reshape(2, 4).requires_grad_()
    part = mappings.Scatter.apply(tensor)
    assert torch.equal(part, tensor[:, 2 * world.rank : 2 * world.rank + 2])
    part.backward(torch.full((2, 2), float(world.rank)))
    assert torch.equal(tensor.grad, torch.tensor([[0.0, 0, 1, 1]] * 2))


def test_reduce(world):
    tensor = torch.ones(3, requires_grad=True)
    total = mappings.Reduce.apply(tensor * (world.rank + 1))
    assert torch.equal(total, torch.full((3,), 3.0))
    total.sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), world.rank + 1.0))


def test_copy(world):
    tensor = torch.ones(2, requires_grad=True)
    mappings.Copy.apply(tensor).backward(torch.full((2,), world.rank + 1.0))
    assert torch.equal(tensor.grad, torch.full((2,), 3.0))
