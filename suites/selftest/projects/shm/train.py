"""A plain script for torchrun: no pytest, two ranks on shm, one step of DDP."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep.shm  # noqa: F401  registers the backend


def main() -> None:
    dist.init_process_group("shm")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    dist.barrier()
    # One write: lines of ranks would mix otherwise.
    os.write(1, f"rank {rank} of {dist.get_world_size()}: {model.module.weight.grad.tolist()}\n".encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
