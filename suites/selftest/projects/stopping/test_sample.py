"""A failure, before which a session fixture was used."""

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="session")
def wide(world):
    yield
    note(world, "wide-torn-down")


def test_a(world, wide):
    note(world, "ran")


@pytest.mark.ranks(3)  # the world of the fixture stays warm
def test_b(world):
    assert world.rank


def test_c(world, wide):
    note(world, "ran")
