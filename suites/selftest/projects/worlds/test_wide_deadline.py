"""A module fixture that is slow to tear down after a failure."""

import pathlib
import time

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def wide():
    yield
    time.sleep(1)
    pathlib.Path("torn-down.txt").touch()


def test_a(world, wide):
    assert False


def test_b(world):
    pass
