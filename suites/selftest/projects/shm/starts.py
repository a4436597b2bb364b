"""Start two ranks in several ways, one after the other: `starts.py DIRECTORY METHOD...`.

A method is how processes start and the store by which they meet: `fork:file`, `spawn:tcp`.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import lockstep.shm  # noqa: F401  registers the backend


def make_store(kind: str, directory: str, rank: int) -> dist.Store:
    if kind == "tcp":
        path = os.path.join(directory, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
            with open(path + ".new", "w") as file:
                file.write(str(store.port))
            os.rename(path + ".new", path)
            return store
        while not os.path.exists(path):
            pass
        with open(path) as file:
            return dist.TCPStore("127.0.0.1", int(file.read()), 2, is_master=False)
    store = dist.FileStore(os.path.join(directory, "store"), 2)
    return dist.PrefixStore("inner", dist.PrefixStore("outer", store)) if kind == "prefix" else store


def opened(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # that of the directory itself
        return ""


def run(rank: int, method: str, directory: str) -> None:
    store = make_store(method.partition(":")[2], directory, rank)
    dist.init_process_group("shm", store=store, rank=rank, world_size=2)
    dist.all_reduce(tensor := torch.ones(100_000))
    gathered = [None, None]
    dist.all_gather_object(gathered, rank)
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.wait()
    dist.barrier()
    dist.destroy_process_group()
    left = [link for link in map(opened, os.listdir("/proc/self/fd")) if "memfd" in link or "pidfd" in link]
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    line = f"{method} rank {rank}: {tensor.sum().item()} {gathered}, left {left}, {threads}\n"
    os.write(1, line.encode())


def main(directory: str, *methods: str) -> None:
    for method in methods:
        place = os.path.join(directory, method.replace(":", "-"))
        os.mkdir(place)
        mp.start_processes(run, (method, place), 2, start_method=method.partition(":")[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
