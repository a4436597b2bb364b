"""Classes of torch's `MultiProcessTestCase` kinds, with every feature that adoption must keep."""

import os
import signal
import sys
import threading
import unittest

import torch
import torch.distributed as dist
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    DistributedTestBase,
    DynamoDistributedMultiProcTestCase,
    MultiProcessTestCase,
    requires_gloo,
    requires_mpi,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    load_tests,
    parametrize,
    run_tests,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

load_tests = load_tests  # for unittest's loader, as torch's files have it


class Base(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def init(self):
        dist.init_process_group(
            "gloo", init_method=f"file://{self.file_name}", rank=self.rank, world_size=self.world_size
        )

    def total(self):
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return int(tensor)


class TestPassing(Base):
    @requires_gloo()
    def test_group(self):
        assert not dist.is_initialized()
        self.init()
        self.assertEqual(self.total(), 2)

    def test_group_again(self):
        self.init()
        pair = dist.new_group([0, 1])
        dist.barrier(group=pair)
        self.assertEqual(dist.get_process_group_ranks(pair), [0, 1])
        dist.destroy_process_group()
        self.assertFalse(dist.is_initialized())

    @parametrize("size", [1, 2])
    def test_parameters(self, size):
        self.assertEqual(torch.ones(size).sum().item(), size)

    def test_subtests(self):
        for value in range(3):
            with self.subTest(value=value):
                self.assertLess(value, 3)

    def test_cleanup(self):
        self.addCleanup(os.environ.pop, "OF_CLEANUP")
        os.environ["OF_CLEANUP"] = "1"

    def test_seed(self):
        self.assertEqual(torch.initial_seed(), 1234)

    def test_no_process_group_of_the_rank(self):
        self.assertFalse(dist.is_initialized())
        self.assertIsNone(dist.group.WORLD)


instantiate_parametrized_tests(TestPassing)


class TestDTensor(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    def test_1_mesh(self):
        self.assertEqual(self.build_device_mesh().size(), 2)

    @with_comms
    def test_2_fails(self):
        self.assertEqual(self.rank, 0)

    @with_comms
    def test_3_then(self):
        self.run_subtests({"value": [1, 2]}, lambda value: self.assertGreater(value, 0))


class TestFsdp(FSDPTest):
    @property
    def world_size(self):
        return 2

    def test_needs_gpus(self):
        raise AssertionError


class TestOfBase(DistributedTestBase):
    @property
    def world_size(self):
        return 2

    def test_pg(self):
        self.create_pg("cpu")
        self.assertEqual(dist.get_world_size(), int(os.environ["WORLD_SIZE"]))

    def test_pg_again(self):
        self.create_pg("cpu")
        dist.barrier()


class TestDynamo(DynamoDistributedMultiProcTestCase):
    def test_no_process(self):
        raise AssertionError


class TestOfDevices(Base):
    def test_device(self, device):
        self.assertEqual(device, "cpu")


instantiate_device_type_tests(TestOfDevices, globals(), only_for="cpu")


class TestSkipping(Base):
    @unittest.skip("not today")
    def test_decorated(self):
        pass

    @requires_mpi()
    def test_mpi(self):
        raise AssertionError

    @skip_if_lt_x_gpu(2)
    def test_gpus(self):
        raise AssertionError

    def test_in_body(self):
        raise unittest.SkipTest("in the body")

    def test_on_rank_0(self):
        if self.rank == 0:
            self.skipTest("on one")

    def test_on_rank_1(self):
        if self.rank == 1:
            sys.exit(TEST_SKIPS["no_cuda"].exit_code)

    def test_skip_and_failure(self):
        if self.rank == 1:
            raise ValueError("of rank 1")
        sys.exit(TEST_SKIPS["no_cuda"].exit_code)


class TestSkippingSetUp(Base):
    def setUp(self):
        raise unittest.SkipTest("in setUp")

    def test_x(self):
        raise AssertionError


class TestStartingNothing(Base):
    def setUp(self):
        MultiProcessTestCase.setUp(self)

    def test_x(self):
        raise AssertionError


class TestFailing(Base):
    def test_1_one_rank(self):
        self.assertEqual(self.rank, 0)

    def test_2_all(self):
        self.assertEqual(1, 2)

    def test_3_under_collective(self):
        self.init()
        if self.rank == 1:
            raise ValueError("of rank 1")
        dist.barrier()

    def test_4_in_subtest(self):
        for value in range(3):
            with self.subTest(value=value):
                self.assertLess(value, 1)

    def test_5_then(self):
        self.init()
        self.assertEqual(self.total(), 2)


class TestFailingTearDown(Base):
    def tearDown(self):
        super().tearDown()
        raise ValueError("of tearDown")

    def test_x(self):
        pass


class TestEnding(Base):
    def test_1_exit_0_of_one(self):
        if self.rank == 1:
            sys.exit(0)

    def test_2_exit_0_of_all(self):
        sys.exit(0)
        self.fail("not reached")

    def test_3_exit_3_of_one(self):
        if self.rank == 1:
            sys.exit(3)

    def test_4_killed(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_5_killed_under_collective(self):
        self.init()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_6_gone(self):
        if self.rank == 1:
            os._exit(0)

    def test_7_then(self):
        pass


class TestHanging(Base):
    def test_1_one_waits(self):
        self.init()
        dist.barrier()
        if self.rank == 0:
            self.total()

    def test_2_then(self):
        self.init()
        self.assertEqual(self.total(), 2)


class TestExpecting(Base):
    @unittest.expectedFailure
    def test_all(self):
        self.assertEqual(1, 2)

    @unittest.expectedFailure
    def test_one_rank(self):
        self.init()
        self.assertEqual(self.rank, 0)
        dist.barrier()

    @unittest.expectedFailure
    def test_unexpected(self):
        pass


class TestState(Base):
    def test_1_changes(self):
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        type(self).left = Base.left = 1
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True, name="left").start()

    def test_2_finds_none(self):
        self.assertNotIn("LEFT", os.environ)
        self.assertEqual(torch.ones(1).dtype, torch.float32)
        self.assertFalse(torch.are_deterministic_algorithms_enabled())
        self.assertFalse(hasattr(self, "left"))


if __name__ == "__main__":
    run_tests()
