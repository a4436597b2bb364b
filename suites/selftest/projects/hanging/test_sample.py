"""A test in which each rank hangs in another way."""

import os
import signal
import subprocess
import time

import pytest
from notes import note

if "RANK" in os.environ:
    import torch.distributed as dist
pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(int(os.environ["SIZE"]))
def test_hangs(world):
    subprocess.Popen(["sleep", "300"])
    note(world, "reached")
    match world.rank:
        case 0:
            sum(range(10**12))
        case 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        case 2:
            time.sleep(300)
        case 3:
            dist.barrier()
