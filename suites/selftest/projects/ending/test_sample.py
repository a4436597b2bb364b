"""A test that the time limit ends, between two that use a session fixture."""

import time

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="session")
def wide(world):
    yield
    note(world, "wide-torn-down")


def test_a(world, wide):
    note(world, "ran")


def test_b(world):
    time.sleep(300)


def test_c(world, wide):
    note(world, "ran")
