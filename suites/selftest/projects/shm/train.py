"""A plain script for torchrun: no pytest, two ranks on shm, the mean of a gradient.

Not by DDP, which imports all of torch's compiler: `suites/selftest/shm/test_torch.py` has its models.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep.shm  # noqa: F401  registers the backend


def main() -> None:
    dist.init_process_group("shm")
    rank = dist.get_rank()
    model = nn.Linear(2, 1, bias=False)
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    dist.all_reduce(model.weight.grad, dist.ReduceOp.AVG)
    dist.barrier()
    # One write: lines of ranks would mix otherwise.
    os.write(1, f"rank {rank} of {dist.get_world_size()}: {model.weight.grad.tolist()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
