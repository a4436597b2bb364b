"""Classes that `python -m lockstep port` leaves, as a whole or in part, with a comment that says why."""

import elsewhere
import torch.distributed as dist
from elsewhere import Mixin, inspect_case
from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
from torch.testing._internal.common_utils import TestCase, run_tests


class PlainTest(TestCase):
    def test_nothing_of_ranks(self):
        self.assertEqual(1, 1)


class ThreadedTest(MultiThreadedTestCase):
    def test_in_threads(self):
        self.assertTrue(True)


class ForeignTest(Mixin, MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_of_a_mixin(self):
        self.assertTrue(True)


class LauncherTest(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _run(self):
        pass

    def test_launched(self):
        self.assertTrue(True)


class DerivedTest(LauncherTest):
    def test_derived(self):
        self.assertTrue(True)


class PartlyTest(MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_inline(self):
        # the text stays
        self.assertExpectedInline("a", "a")
        self.assertTrue(True)

    def test_passed_on(self):
        inspect_case(self)

    @elsewhere.decorator
    def test_decorated(self):
        pass

    def test_timeout(self):
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, timeout=1)

    def test_starred(self, *values):
        if self.assertTrue(*values):
            pass
        with open(self.file_name) as file:
            self.assertEqual(file.read(), "")

    def test_whole(self):
        self.assertIsNone(None)


if __name__ == "__main__":
    run_tests()
