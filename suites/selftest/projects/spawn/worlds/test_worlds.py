"""Calls of spawn, as tests of other projects have them."""

import logging
import os
import signal
import subprocess
import sys
import time
import unittest

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing import spawn

PORT = 29517


def join_group(rank, how):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(PORT))
    method = "env://" if how == "env" else f"tcp://127.0.0.1:{PORT}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)


def reduce(rank, how):
    join_group(rank, how)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3
    print(f"rank {rank} is process {os.getpid()}")


@pytest.mark.parametrize("how", ["env", "tcp"])
@pytest.mark.parametrize("time", [1, 2])
def test_group(how, time):
    spawn(reduce, args=(how,), nprocs=2, join=True)
    assert "MASTER_PORT" not in os.environ


def end(rank, how):
    join_group(rank, "tcp")
    if rank == 1:
        match how:
            case "raises":
                assert [1, 2] == [1, 3], "of rank 1"
            case "exits":
                sys.exit(3)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "returns":
                return
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", ["raises", "exits", "dies", "returns"])
def test_fails(how):
    mp.spawn(end, (how,), nprocs=2)


def test_exceptions_are_those_of_torch():
    with pytest.raises(
        mp.ProcessRaisedException, match=r"-- Process 1 terminated .*\n(.*\n)*.*of rank 1"
    ) as raised:
        mp.spawn(end, ("raises",), nprocs=2)
    assert (raised.value.error_index, raised.value.error_pid > 1) == (1, True)
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with exit code 3") as raised:
        mp.spawn(end, ("exits",), nprocs=2)
    assert raised.value.exit_code == 3
    with pytest.raises(mp.ProcessExitedException, match="process 1 terminated with signal SIGKILL") as raised:
        mp.spawn(end, ("dies",), nprocs=2)
    assert (raised.value.exit_code, raised.value.signal_name) == (-9, "SIGKILL")


class LeftHandler(logging.Handler):
    pass


def record_of_a_rank(*args, **kwargs):
    raise ValueError(f"rank {dist.get_rank()} has no group any more")


def leave(rank):
    logging.setLogRecordFactory(record_of_a_rank)
    logging.getLogger().addHandler(LeftHandler())
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT"] = "1"
    os.chdir("/")
    if rank == 0:
        subprocess.Popen(["sleep", "1000"])


def look(rank, directory):
    found = torch.get_default_dtype(), "LEFT" in os.environ, os.getcwd()
    assert found == (torch.float32, False, directory)
    logging.getLogger().warning("a record can be made")
    assert not any(isinstance(each, LeftHandler) for each in logging.getLogger().handlers)


def test_state():
    mp.spawn(leave, nprocs=2)
    mp.spawn(look, (os.getcwd(),), nprocs=2)


def skip(rank):
    pytest.skip("on a rank")


def test_no_process_can_skip():
    with pytest.raises(mp.ProcessExitedException, match="terminated with exit code 1"):
        mp.spawn(skip, nprocs=2)


def see(rank, name, value):
    assert os.environ.get(name) == value
    assert not dist.is_initialized()
    assert "RANK" not in os.environ


def test_environment(monkeypatch):
    monkeypatch.setenv("SET_BY_THE_TEST", "1")
    mp.spawn(see, ("SET_BY_THE_TEST", "1"), nprocs=2)


def wait_a_little(rank):
    time.sleep(0.01)


def nest(rank):
    mp.spawn(wait_a_little, nprocs=2)


def test_nested():
    mp.spawn(nest, nprocs=2)


def test_more_than_cores():
    mp.spawn(wait_a_little, nprocs=5)


def test_fixture(files):
    assert sorted(path.name for path in files.iterdir()) == ["0", "1"]


class TestClass(unittest.TestCase):
    def test_method(self):
        mp.spawn(reduce, ("tcp",), nprocs=2)


def fill(rank, tensor):
    tensor[rank] = rank + 1


def test_shared_tensor():
    tensor = torch.zeros(2)
    mp.spawn(fill, (tensor,), nprocs=2)
    assert tensor.tolist() == [1, 2]


def say(rank):
    print(f"rank {rank} says so", flush=True)


def test_output(capfd):
    mp.spawn(say, nprocs=2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank 0 says so", "rank 1 says so"]


@pytest.mark.own_processes
def test_marked():
    mp.spawn(say, nprocs=2)


def test_context():
    context = mp.spawn(say, nprocs=2, join=False)
    while not context.join():
        pass


def test_lambda_cannot_be_sent():
    with pytest.raises(Exception, match="local object"):  # not pickled, or in Python 3.13 not found
        mp.spawn(lambda rank: None, nprocs=1)
