"""Rank 1 is killed while rank 0 waits for it, once in each way to wait: `deaths.py DIRECTORY WAY...`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep.shm  # noqa: F401  registers the backend

WAYS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "future": lambda: dist.all_reduce(torch.ones(4), async_op=True).get_future().wait(),
    "recv": lambda: dist.recv(torch.ones(4), 1),
    "recv from any": lambda: dist.recv(torch.ones(4)),
    "send": lambda: dist.send(torch.ones(100_000), 1),
    "future of a receive": lambda: dist.irecv(torch.ones(4), 1).get_future().wait(),
}


def run(rank: int, way: str, path: str) -> None:
    dist.init_process_group("shm", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)  # rank 0 shall wait by then; if it does not yet, the outcome is the same
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        WAYS[way]()
        outcome = "no error"
    except RuntimeError as error:
        lines = str(error).splitlines()  # that of a future has the traceback of its thread
        outcome = f"{type(error).__name__}: {' '.join(lines)}"
    os.write(1, f"{way}: {outcome}\n".encode())
    dist.destroy_process_group()


def main(directory: str, *ways: str) -> None:
    for number, way in enumerate(ways):
        path = os.path.join(directory, str(number))
        ranks = [mp.get_context("fork").Process(target=run, args=(rank, way, path)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
