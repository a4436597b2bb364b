"""Tests whose list a plugin changes during the run."""

import pytest
from notes import note


@pytest.fixture(scope="module")
def wide(world):
    note(world, "wide-set-up")
    yield
    note(world, "wide-torn-down")


@pytest.mark.ranks(2)
def test_removes(wide):
    pass


@pytest.mark.ranks(2)
def test_removed(wide):
    pass


@pytest.mark.ranks(2)
def test_stays(wide):
    pass


@pytest.mark.ranks(2)
def test_adds(wide):
    pass


def test_added():
    pass
