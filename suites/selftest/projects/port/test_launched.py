# Owner(s): the header stays
"""Test classes of torch's launchers, as their authors write them: the input of `python -m lockstep port`."""

import os
import unittest

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    requires_gloo,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_fsdp import FSDPTest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

SIZE = 2


class GroupTest(MultiProcessTestCase):
    """Makes its group itself."""

    @property
    def world_size(self):
        return SIZE

    def setUp(self):
        super().setUp()
        os.environ["PORT_VARIABLE"] = "set"
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    def _join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend="gloo", rank=self.rank, world_size=self.world_size, store=store)

    def _sum(self, value):
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor

    @requires_gloo()
    def test_sum(self):
        # this comment is about joining
        self._join()  # and so is this one

        # the sum of ranks
        total = self._sum(float(self.rank))
        self.assertEqual(total, torch.tensor([1.0]))  # close is enough
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertEqual(os.environ["PORT_VARIABLE"], "set")
        dist.destroy_process_group()

    def test_one_rank_fails(self):
        self._join()
        if self.rank == 1:
            self.assertEqual(self.rank, 0, "the second rank is not the first")

    @unittest.expectedFailure
    def test_expected_failure(self):
        self.assertTrue(False)

    @unittest.skip("not today")
    def test_skipped(self):
        self.fail("it ran")

    @skip_if_lt_x_gpu(8)
    def test_of_many_gpus(self):
        self.fail("it ran")

    def test_skip_inside(self):
        self.skipTest("said inside")


class TensorTest(DTensorTestBase):
    @property
    def world_size(self):
        return 2

    @with_comms
    def test_mesh(self):
        mesh = self.build_device_mesh()
        tensor = distribute_tensor(torch.arange(4.0, device=self.device_type), mesh, [Shard(0)])
        self.assertEqual(tensor.full_tensor(), torch.arange(4.0))
        self.assertEqual(tensor.to_local().shape, (2,))
        self.assertNotEqual(tensor.to_local(), torch.zeros(2))

    @with_comms
    def test_subtests(self):
        self.run_subtests({"factor": [1, 2], "offset": [0, 3]}, self._check_linear, scale=2)

    def _check_linear(self, factor, offset, scale):
        tensor = torch.tensor([float(factor * scale + offset)])
        dist.all_reduce(tensor)
        self.assertEqual(tensor, torch.tensor([2.0 * (factor * scale + offset)]))
        self.assertLess(self.rank, self.world_size)


@instantiate_parametrized_tests
class ParametrizedTest(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        os.environ["PORT_CLASS"] = "set"
        super().setUpClass()

    @classmethod
    def backend_str(cls):
        return "gloo"

    @parametrize("value", [1, subtest(2, name="two")])
    def test_value(self, value):
        gathered = [None] * self.world_size
        dist.all_gather_object(gathered, value + self.rank)
        self.assertEqual(gathered, [value, value + 1])

    @parametrize("a,b", [(1, 2), subtest((3, 4), name="larger")])
    def test_pair(self, a, b):
        self.assertEqual(self.pg.size(), 2)
        with self.assertRaisesRegex(ValueError, "b is .") as caught:
            raise ValueError(f"b is {b}")
        self.assertIn(str(b), str(caught.exception))
        self.assertRaises(ZeroDivisionError, lambda: a // 0)

    def test_class_set_up(self):
        self.assertEqual(os.environ["PORT_CLASS"], "set")


class DeviceTest(DistributedTestBase):
    @property
    def world_size(self):
        return 2

    def test_on_device(self, device):
        pg = self.create_pg(device)
        tensor = torch.ones(
            2,
            device=device,
        )
        dist.all_reduce(tensor, group=pg)
        self.assertEqual(
            tensor,
            # twice one
            torch.full((2,), 2.0, device=device),
        )
        for part in (0, 1):
            with self.subTest(part=part):
                self.assertAlmostEqual(tensor[part].item(), 2.0)
        dist.barrier()


instantiate_device_type_tests(DeviceTest, globals(), only_for=("cpu",))


class ShardedTest(FSDPTest):
    def test_of_gpus(self):
        self.fail("it ran")


if __name__ == "__main__":
    run_tests()
