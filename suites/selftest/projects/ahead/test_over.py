"""A test that begins ahead, and that pytest then passes over: the last one on ranks."""

import time
from pathlib import Path

import pytest
from notes import note


@pytest.fixture(scope="module")
def wide(world):
    yield
    note(world, "wide-torn-down")


@pytest.mark.ranks(2)
def test_before_unmarked(wide):
    pass


@pytest.mark.ranks(2)
def test_passed_over(world, wide):
    note(world, "begun")
    time.sleep(60)


def test_unmarked():
    assert Path("wide-torn-down-0.txt").exists()
