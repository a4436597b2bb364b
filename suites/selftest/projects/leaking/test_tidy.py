"""Tests that leave nothing behind, however they work."""

import multiprocessing
import os
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory

import pytest
from pids import SLEEP

if "RANK" in os.environ:
    import torch
    import torch.distributed as dist

pytestmark = pytest.mark.ranks(2)


def test_ends_what_it_starts(world, tmp_path):
    child = subprocess.Popen(SLEEP)
    child.kill()
    child.wait()
    subprocess.Popen(["true"])
    thread = threading.Thread(target=time.sleep, args=(0.01,))
    thread.start()
    os.close(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY))
    segment = SharedMemory(create=True, size=100)
    segment.close()
    segment.unlink()
    files = [open(tmp_path / "file")]
    files.append(files)
    files[0].close()


def test_data_loader(world):
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, collate_fn=sum)
    assert sum(loader) == 28


def test_process_of_another_start_method(world):
    child = multiprocessing.get_context("forkserver").Process(target=abs, args=(1,))
    child.start()
    child.join()
    assert child.exitcode == 0


def test_pools(world):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(abs, -1).result() == 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(abs, -1).result() == 1


def test_shared_tensors_and_native_threads(world):
    _tensor = torch.ones(3).share_memory_()
    _value = multiprocessing.Value("i", 1)
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: threading.current_thread() and None)
    weight.sum().backward()


def test_groups(world):
    group = dist.new_group()
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.fixture(scope="class")
def server(tmp_path_factory):
    child = subprocess.Popen(SLEEP)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    segment = SharedMemory(create=True, size=100)
    with open(tmp_path_factory.mktemp("server") / "log", "w"):
        yield child
    segment.close()
    segment.unlink()
    stop.set()
    thread.join()
    child.kill()
    child.wait()


class TestTidyFixture:
    def test_first(self, world, server):
        assert server.poll() is None

    def test_between(self, world):
        pass

    def test_last(self, world, server):
        assert server.poll() is None


@pytest.fixture(scope="module")
def address():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADDRESS", "somewhere")
        yield


@pytest.fixture(scope="class")
def client(request):
    request.getfixturevalue("address")


class TestFixtureOfAWiderOne:
    def test_client(self, world, client):
        assert os.environ["ADDRESS"] == "somewhere"


def test_wider_fixture_stands_after_the_one_that_requested_it(world):
    assert os.environ["ADDRESS"] == "somewhere"
