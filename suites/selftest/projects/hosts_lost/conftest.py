"""Lets the ranks of a world of three wait as they start."""

import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def pytest_configure():
    if os.environ.get("WORLD_SIZE") == "3":
        (HERE / "lost as it starts.reached").touch()
        while not (HERE / "lost as it starts").exists():
            time.sleep(0.02)
