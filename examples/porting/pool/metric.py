"""The code under test: a mean over what all ranks have seen."""

import torch
import torch.distributed as dist


class Mean:
    """Sum and count of values, which `compute` adds over ranks."""

    def __init__(self):
        self.state = torch.zeros(2)

    def update(self, values):
        self.state += torch.tensor([values.sum().item(), values.numel()])

    def compute(self):
        total = self.state.clone()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def gather_uneven(tensor):
    """Return the one-dimensional tensors of all ranks, which may differ in length."""
    size = torch.tensor([tensor.numel()])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(size) for size in sizes)
    padded = [torch.zeros(longest) for _ in sizes]
    dist.all_gather(padded, torch.nn.functional.pad(tensor, (0, longest - tensor.numel())))
    return [values[: int(size)] for values, size in zip(padded, sizes, strict=True)]
