import pathlib
import time

import pytest


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.ranks(1, 2, 3)
def test_marked(world, turn):
    time.sleep(0.02)
    pathlib.Path("many.txt").touch()


@pytest.mark.parametrize("turn", range(2))
def test_plain(turn):
    time.sleep(0.02)


@pytest.mark.ranks(5)
def test_too_large(world):
    pass
