import pathlib
import time

import pytest

pytestmark = pytest.mark.ranks(2)


def test_a(world):
    assert world.rank == 0


def test_b(world):
    assert world.rank == 0


def test_c(world):
    breakpoint()
    pathlib.Path(f"runs-{world.rank}.txt").touch()
    time.sleep(60)
