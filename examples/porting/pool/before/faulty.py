"""The faults in a pool of processes."""

from functools import partial

import faults
import pytest
import torch.distributed as dist


def run(_, name):
    getattr(faults, name)(dist.get_rank())


@pytest.mark.parametrize("name", ["killed", "exits", "hangs", "deadlocks", "skips", "leaks"])
def test(name):
    pytest.pool.map(partial(run, name=name), range(2))
