"""Regions of tensor parallelism, as in Megatron-LM's tests/unit_tests/tensor_parallel/test_mappings.py.

Run by `torchrun --nproc-per-node 2 -m pytest test_mappings.py`.
"""

import group
import mappings
import torch


def test_scatter():
    group.initialize()
    tensor = torch.arange(8.0).reshape(2, 4).requires_grad_()
    part = mappings.Scatter.apply(tensor)
    assert torch.equal(part, tensor[:, 2 * group.rank : 2 * group.rank + 2])
    part.backward(torch.full((2, 2), float(group.rank)))
    assert torch.equal(tensor.grad, torch.tensor([[0.0, 0, 1, 1]] * 2))
    group.finish()


def test_reduce():
    group.initialize()
    tensor = torch.ones(3, requires_grad=True)
    total = mappings.Reduce.apply(tensor * (group.rank + 1))
    assert torch.equal(total, torch.full((3,), 3.0))
    total.sum().backward()
    assert torch.equal(tensor.grad, torch.full((3,), group.rank + 1.0))
    group.finish()


def test_copy():
    group.initialize()
    tensor = torch.ones(2, requires_grad=True)
    mappings.Copy.apply(tensor).backward(torch.full((2,), group.rank + 1.0))
    assert torch.equal(tensor.grad, torch.full((2,), 3.0))
    group.finish()
