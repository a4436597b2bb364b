"""A test that kills its worker of pytest-xdist."""

import os
import pathlib
import signal
import time


def test_crashes():
    worker = os.environ["PYTEST_XDIST_WORKER"]
    while not pathlib.Path(f"{worker}-0.txt").exists():
        time.sleep(0.01)
    pathlib.Path("dead").write_text(f"{worker} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)
