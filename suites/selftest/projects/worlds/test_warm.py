"""Worlds that are reused, made fresh on request, and replaced after a failure."""

import pytest
from notes import note

pytestmark = pytest.mark.ranks(2)


def test_a(world):
    note(world, "warm")


@pytest.mark.ranks(3)
def test_other_size(world):
    note(world, "three")


def test_b(world):
    note(world, "warm")


@pytest.mark.ranks(2, fresh=True)
def test_fresh(world):
    note(world, "fresh")


def test_c(world):
    note(world, "warm")


def test_failing(world):
    note(world, "warm")
    assert world.rank == 0


def test_d(world):
    note(world, "replaced")


@pytest.mark.ranks(3)
def test_other_size_again(world):
    note(world, "three")
