"""Classes that derive from torch's MultiProcContinuousTest, one for each way in which they differ."""

import os
import signal
import sys
import unittest
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    MultiProcContinuousTest,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorContinuousTestBase

SKIPPED = TEST_SKIPS["no_cuda"]


class OnTwo(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def total(self, value=1):
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item()


class TestPassing(OnTwo):
    groups: ClassVar[list[object]] = []

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.made_by_set_up_class = True

    @classmethod
    def tearDownClass(cls):
        del cls.made_by_set_up_class
        super().tearDownClass()

    def setUp(self):
        self.rank_before_set_up = self.rank
        super().setUp()
        assert self.rank == self.MAIN_PROCESS_RANK

    def tearDown(self):
        assert self.rank == self.MAIN_PROCESS_RANK
        super().tearDown()

    def test_1_sum(self):
        self.assertEqual(self.total(self.rank + 1), 3)

    def test_2_names(self):
        self.assertEqual((self.rank, self.world_size), (dist.get_rank(), 2))
        self.assertEqual((type(self).rank, type(self).world_size), (self.rank, 2))
        self.assertIs(self.pg, dist.group.WORLD)
        self.assertEqual(os.environ["LOCAL_RANK"], str(self.rank))
        self.groups.append(self.pg)

    def test_3_same_group(self):
        self.assertEqual(self.groups, [self.pg])
        self.assertEqual(self.total(), 2)

    def test_4_seed(self):
        numbers = [torch.empty(2) for _ in range(2)]
        dist.all_gather(numbers, torch.rand(2))
        self.assertEqual(numbers[0], numbers[1])

    def test_5_new_group(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=dist.new_group([0, 1]))
        self.assertEqual(tensor.item(), 2)


class TestAnother(OnTwo):
    """Its items may run between those of TestPassing."""

    def test_sum(self):
        self.assertEqual(self.total(), 2)


@instantiate_parametrized_tests
class TestParametrized(OnTwo):
    @parametrize("value", [1, 2])
    def test_sum(self, value):
        self.assertEqual(self.total(value), 2 * value)


class TestOfDevices(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_sum(self, device):
        tensor = torch.ones(1, device=device)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.item(), 2)


instantiate_device_type_tests(TestOfDevices, globals(), only_for=("cpu",))


class TestDeviceProperty(OnTwo):
    @property
    def device_type(self):
        return "cpu"

    def test_sum(self):
        self.assertEqual((self.total(), self.device_type), (2, "cpu"))


class TestDeviceString(OnTwo):
    device_type = "cpu"

    def test_sum(self):
        self.assertEqual(self.total(), 2)


class TestDeviceFunction(OnTwo):
    device_type = staticmethod(lambda: "cpu")

    def test_sum(self):
        self.assertEqual(self.total(), 2)


class TestSizeProperty(OnTwo):
    @property
    def world_size(self):
        return 2

    def test_sum(self):
        self.assertEqual((self.total(), self.world_size), (2, 2))


class TestDTensor(DTensorContinuousTestBase):
    world_size = 2

    def test_mesh(self):
        # torch 2.11 has build_device_mesh in its other base class alone.
        build = getattr(self, "build_device_mesh", lambda: init_device_mesh("cpu", (2,)))
        self.assertEqual(build().size(), 2)


class TestSkipping(OnTwo):
    @unittest.skip("not today")
    def test_1_decorated(self):
        raise AssertionError

    @skip_if_lt_x_gpu(8)
    def test_2_gpus(self):
        raise AssertionError

    def test_3_code(self):
        sys.exit(SKIPPED.exit_code)

    def test_4_code_on_one_rank(self):
        if self.rank == 1:
            sys.exit(SKIPPED.exit_code)

    def test_5_then(self):
        self.assertEqual(self.total(), 2)


class TestNoBackend(OnTwo):
    @classmethod
    def backend_str(cls):
        return "mpi"

    def test_sum(self):
        raise AssertionError


class TestSkippingInit(OnTwo):
    @classmethod
    def _init_pg(cls, rank, world_size, rdvz_file):
        sys.exit(SKIPPED.exit_code)

    def test_1(self):
        raise AssertionError

    def test_2(self):
        raise AssertionError


class TestFailing(OnTwo):
    def test_1_one_rank(self):
        self.assertEqual(self.rank, 0)

    def test_2_then(self):
        self.assertEqual(self.total(), 2)


class TestFailingUnderCollective(OnTwo):
    def test_1_one_rank(self):
        if self.rank == 1:
            raise ValueError("of rank 1")
        self.total()

    def test_2_then(self):
        self.assertEqual(self.total(), 2)


class TestExpecting(OnTwo):
    @unittest.expectedFailure
    def test_1_expected(self):
        self.assertEqual(self.total(), 3)


class TestSkipInBody(OnTwo):
    def test_1_all(self):
        raise unittest.SkipTest("in the body")

    def test_2_one(self):
        if self.rank == 1:
            raise unittest.SkipTest("in the body")


class TestExit(OnTwo):
    def test_1_zero(self):
        sys.exit(0)


class TestKilled(OnTwo):
    def test_1_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_2_then(self):
        self.assertEqual(self.total(), 2)


class TestGone(OnTwo):
    def test_1_gone(self):
        if self.rank == 1:
            os._exit(0)


class TestHanging(OnTwo):
    def test_1_one_waits(self):
        if self.rank == 0:
            self.total()

    def test_2_then(self):
        self.assertEqual(self.total(), 2)


class TestLauncherOfItsOwn(OnTwo):
    @classmethod
    def _spawn_processes(cls, world_size):
        super()._spawn_processes(world_size)

    def test_sum(self):
        self.assertEqual(self.total(), 2)


if __name__ == "__main__":
    run_tests()
