"""Ranks with uneven inputs under `Join`: the claims of PyTorch's test/distributed/algorithms/test_join.py."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests


class Shadow(JoinHook):
    """Take part in the sums of the ranks that still have inputs."""

    def __init__(self, counter):
        self.counter = counter

    def main_hook(self):
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner):
        self.counter.was_last = is_last_joiner


class Counter(Joinable):
    """Count at each call the ranks that call it."""

    def __init__(self):
        super().__init__()
        self.was_last = None

    def __call__(self):
        Join.notify_join_context(self)
        active = torch.ones(1)
        dist.all_reduce(active)
        return int(active)

    def join_hook(self, **kwargs):
        return Shadow(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


class JoinTest(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        with contextlib.suppress(OSError):
            os.remove(self.file_name)

    def _init_group(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def test_ranks_that_are_done_are_shadowed(self):
        self._init_group()
        counter = Counter()
        with Join([counter]):
            seen = [counter() for _ in range(2 + self.rank)]
        self.assertEqual(seen, [2, 2, 1][: 2 + self.rank])

    def test_the_last_rank_is_known_to_the_post_hook(self):
        self._init_group()
        counter = Counter()
        with Join([counter]):
            for _ in range(1 + self.rank):
                counter()
        self.assertEqual(counter.was_last, self.rank == 1)

    def test_an_early_end_is_raised_on_all_ranks(self):
        self._init_group()
        counter = Counter()
        with self.assertRaisesRegex(RuntimeError, r"exhausted all inputs|Detected at least one rank"):
            with Join([counter], throw_on_early_termination=True):
                for _ in range(1 + self.rank):
                    counter()


if __name__ == "__main__":
    run_tests()
