"""A launcher of the kind of DeepSpeed's: classes that are called with the request of a test."""

import contextlib
import inspect
import multiprocessing
import os
import socket
import tempfile
import time

import pytest
import torch.distributed as dist
from _pytest.fixtures import FixtureLookupError


class Exec:
    world_size = 2
    backend = "gloo"
    init_distributed = True
    set_dist_env = True
    requires_cuda_env = False
    reuse_dist_env = False
    non_daemonic_procs = False
    exec_timeout = 20

    def __call__(self, request):
        self.kwargs = self._kwargs_of(request, self.run)
        self._launch_with_file_store(request, self.world_size)

    def _kwargs_of(self, request, function):
        kwargs = {}
        for name in list(inspect.signature(function).parameters):
            with contextlib.suppress(FixtureLookupError):  # it has a default
                kwargs[name] = request.getfixturevalue(name)
        return kwargs

    def _launch_with_file_store(self, request, world_size):
        folder = str(request.getfixturevalue("tmpdir"))
        for size in [world_size] if isinstance(world_size, int) else world_size:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                self._launch_procs(size, f"file://{file.name}")
            time.sleep(0.5)

    def _launch_procs(self, num_procs, init_method):
        if self.requires_cuda_env:
            pytest.skip("only with an accelerator")
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = listener.getsockname()[1]
        multiprocessing.set_start_method("fork", force=True)
        skips = multiprocessing.Queue()
        arguments = [(rank, num_procs, port, init_method, skips) for rank in range(num_procs)]
        processes = [multiprocessing.Process(target=self._dist_run, args=each) for each in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + self.exec_timeout
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0.1))
        for process in processes:
            process.kill()
        if any(process.exitcode is None or process.exitcode < 0 for process in processes):
            pytest.exit("a test hangs", returncode=1)
        assert not any(process.exitcode for process in processes)
        if not skips.empty():
            pytest.skip(skips.get())

    def _dist_run(self, local_rank, num_procs, master_port, init_method, skip_msg=""):
        if self.set_dist_env:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master_port))
            os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(num_procs))
        if self.init_distributed:
            dist.init_process_group(
                self.backend, init_method=init_method, rank=local_rank, world_size=num_procs
            )
        try:
            self.run(**self.kwargs)
        except pytest.skip.Exception as skip:
            skip_msg.put(skip.msg)
        self._dist_destroy()  # together: a rank that ends would break the connections that others still make

    def _dist_destroy(self):
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class DistributedTest(Exec):
    is_dist_test = True

    @pytest.fixture(autouse=True, scope="class")
    def class_tmpdir(self, tmpdir_factory):
        return tmpdir_factory.mktemp(self.__class__.__name__)

    def run(self, **kwargs):
        self.method(**kwargs)

    def __call__(self, request):
        self.method = getattr(self, request.function.__name__)
        self.kwargs = self._kwargs_of(request, self.method)
        marks = [mark for mark in getattr(request.function, "pytestmark", []) if mark.name == "world_size"]
        size = marks[0].args[0] if marks else self.kwargs.get("world_size", self.world_size)
        self._launch_with_file_store(request, size)


class DistributedFixture(Exec):
    is_dist_fixture = True


class written_by_two(DistributedFixture):
    world_size = 2

    def run(self, class_tmpdir):
        class_tmpdir.join(f"of-{os.environ['RANK']}.txt").write(str(dist.get_world_size()))


FIXTURES = [written_by_two]
