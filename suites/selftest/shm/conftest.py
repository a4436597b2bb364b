"""A process group over all ranks of a test, once on shm and once on gloo: a check of the tests themselves."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import lockstep.shm  # noqa: F401  registers the backend
from lockstep.shm.collectives import Collectives
from suites.selftest.shm.ends import meet_all


@pytest.fixture(params=["shm", "gloo"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of `group`; a test of what gloo does not have is parametrised with "shm" alone."""
    return str(request.param)


@pytest.fixture
def group(world: object, backend: str) -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend=backend)
    if backend == "gloo":
        # A rank that destroys the group while another still connects to it fails the other's `new_group`.
        dist.barrier(group=group)
    held = sys.getrefcount(group) + 2  # by pytest, as the value of the fixture and as an argument
    yield group
    # A thread of gloo that is the last to hold its group, by a callback that it has run, would join itself.
    until = time.monotonic() + 0.2
    while sys.getrefcount(group) > held and time.monotonic() < until:
        gc.collect()  # models that hold it
        time.sleep(0.001)
    dist.destroy_process_group(group)


@pytest.fixture
def pair() -> Iterator[list[Collectives]]:
    """The collectives of two ranks of one group, in this process."""
    ends = [Collectives(channel) for channel in meet_all(2)]
    yield ends
    for end in ends:
        end.channel.leave(0)
