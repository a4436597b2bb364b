"""The code under test: tensors that enter and leave a region where a rank has its part of the last dim."""

import torch
import torch.distributed as dist


def _own_part(tensor):
    return tensor.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def _all_parts(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=-1)


class Scatter(torch.autograd.Function):
    """Keep the rank's own part; gather the parts of the gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return _own_part(tensor)

    @staticmethod
    def backward(ctx, grad):
        return _all_parts(grad)


class Reduce(torch.autograd.Function):
    """Sum over ranks; the gradient is the same on each."""

    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad


class Copy(torch.autograd.Function):
    """Give each rank the same tensor; sum the gradients."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total
