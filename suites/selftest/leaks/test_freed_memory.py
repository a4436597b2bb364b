"""Memory that tests have freed goes back to the system, once a rank has grown by much of it."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from lockstep.features.leaks.guard import GROWTH, FreedMemory


class Cycle:
    """A model that refers to itself, as those with hooks do: only the collector frees it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = torch.ones(nbytes, dtype=torch.uint8)
        self.itself = self


@pytest.fixture(autouse=True)
def no_collection_by_itself() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_cycles_are_freed_after_much_growth_alone() -> None:
    guard = FreedMemory()
    small = weakref.ref(Cycle(1 << 10))
    guard.pytest_ranks_finished()
    assert small() is not None
    large = weakref.ref(Cycle(2 * GROWTH))
    guard.pytest_ranks_finished()
    assert (small(), large()) == (None, None)
