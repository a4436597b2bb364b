"""Ranks with uneven inputs under `Join`: the claims of PyTorch's test/distributed/algorithms/test_join.py."""

import pytest
import torch
import torch.distributed as dist
from lockstep.assertions import assert_equal
from torch.distributed.algorithms.join import Join, Joinable, JoinHook


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


@pytest.mark.ranks(2, backend="gloo")
class TestJoin:
    def test_ranks_that_are_done_are_shadowed(self, world):
        counter = Counter()
        with Join([counter]):
            seen = [counter() for _ in range(2 + world.rank)]
        assert_equal(seen, [2, 2, 1][: 2 + world.rank])

    def test_the_last_rank_is_known_to_the_post_hook(self, world):
        counter = Counter()
        with Join([counter]):
            for _ in range(1 + world.rank):
                counter()
        assert_equal(counter.was_last, world.rank == 1)

    def test_an_early_end_is_raised_on_all_ranks(self, world):
        counter = Counter()
        with pytest.raises(RuntimeError, match=r"exhausted all inputs|Detected at least one rank"):
            with Join([counter], throw_on_early_termination=True):
                for _ in range(1 + world.rank):
                    counter()
