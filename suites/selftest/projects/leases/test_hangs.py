import pathlib
import time

import pytest


@pytest.mark.ranks(4)
def test_hangs(world):
    pathlib.Path(f"hangs-{world.rank}.txt").touch()
    time.sleep(600)
