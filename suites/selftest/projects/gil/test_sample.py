"""A rank that holds the GIL, and one that waits for it."""

import os
import subprocess

import pytest
from notes import note

if "RANK" in os.environ:
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


def test_hangs(world):
    if world.rank == 0:
        subprocess.Popen(["sleep", "300"])
    note(world, "reached")
    if world.rank == 1:  # holds the GIL, and leaves the processor to others
        import ctypes

        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex), library.pthread_mutex_lock(mutex)
    dist.barrier()
