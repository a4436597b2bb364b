"""Tests after which the run ends, while the next one is running already."""

import time

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def wide(world):
    yield
    note(world, "wide-torn-down")


def test_stops(wide):
    pass


def test_stops_at_once(wide):
    pass


def test_interrupts(wide):
    pass


def test_disagrees(world):
    if world.rank:
        pytest.skip("on one rank")


def test_ends_on_one(world, wide):
    if world.rank == 1:
        note(world, "waits")
        time.sleep(61)


def test_next(world, wide):
    note(world, "begun")
    time.sleep(60)
