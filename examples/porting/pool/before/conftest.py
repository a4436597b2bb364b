"""A pool of two processes with a process group, made before the first test."""

import os
import socket

import pytest
import torch.distributed as dist
from torch.multiprocessing import Pool, set_sharing_strategy, set_start_method

NUM_PROCESSES = 2


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def init_group(rank, world_size, port):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def pytest_sessionstart():
    set_start_method("spawn")
    set_sharing_strategy("file_system")
    port = free_port()
    pytest.pool = Pool(processes=NUM_PROCESSES)
    pytest.pool.starmap(init_group, [(rank, NUM_PROCESSES, port) for rank in range(NUM_PROCESSES)])


def pytest_sessionfinish():
    pytest.pool.close()
    pytest.pool.join()
