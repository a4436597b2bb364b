"""The process group, from the variables of torchrun, and what surrounds each test."""

import os

import torch.distributed as dist

rank = int(os.environ.get("RANK", "0"))
world_size = int(os.environ.get("WORLD_SIZE", "1"))


def initialize():
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()


def finish():
    dist.barrier()
