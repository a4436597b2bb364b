"""A process group over all ranks of a test, once on shm and once on gloo: a check of the tests themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

import harness.shm  # noqa: F401  registers the backend


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
    yield group
    dist.destroy_process_group(group)
