"""Classes and tests that torch's own launcher runs: processes that a test wants to end, and threads."""

import os

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.common_utils import run_tests


class Base(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class TestCodes(Base):
    size = 2

    @property
    def world_size(self):
        return self.size

    def setUp(self):
        MultiProcessTestCase.setUp(self)
        self.size = 1  # for two ranks one process: it is a new interpreter
        of_this_test = getattr(getattr(self, self._testMethodName), "__wrapped__", None)
        if "code" in self._testMethodName:
            self.special_return_code_checks = {of_this_test: 7}
        else:
            self.skip_return_code_checks = [of_this_test]
        self._spawn_processes()

    def test_any(self):
        os._exit(5)

    def test_code_wrong(self):
        os._exit(8)


class TestLauncherOfItsOwn(Base):
    def _spawn_processes(self):
        self._start_processes(torch.multiprocessing.get_context("spawn").Process)

    def test_x(self):
        self.assertLess(self.rank, 2)


class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_x(self):
        self.assertEqual(dist.get_world_size(), 2)


if __name__ == "__main__":
    run_tests()
