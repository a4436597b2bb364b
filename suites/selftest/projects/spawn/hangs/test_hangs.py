"""Processes of tests that hang, where torch's own spawn would never return."""

import contextlib
import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(1000)  # for ever
    dist.all_reduce(torch.ones(1))


def test_on_warm_ranks(tmp_path):
    with contextlib.suppress(Exception):
        mp.spawn(run, (str(tmp_path / "store"),), nprocs=2)


@pytest.mark.own_processes
def test_in_own_processes(tmp_path):
    with contextlib.suppress(Exception):
        mp.spawn(run, (str(tmp_path / "store"),), nprocs=2)


def test_in_new_interpreters(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    mp.spawn(run, (str(tmp_path / "store"),), nprocs=2)


def test_in_a_context(tmp_path):
    context = mp.spawn(run, (str(tmp_path / "store"),), nprocs=2, join=False)
    while not context.join():
        pass


def wait():
    time.sleep(1000)  # of a process


def test_a_process():
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=wait) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def pass_by(rank):
    pass


def test_healthy():
    mp.spawn(pass_by, nprocs=2)
