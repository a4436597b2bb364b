"""A fixture that a test requests after it changed state itself."""

import os

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="module")
def wide():
    os.environ["WIDE"] = "1"
    yield
    del os.environ["WIDE"]


def test_a(world, request, monkeypatch):
    monkeypatch.setenv("NARROW", "1")
    request.getfixturevalue("wide")


def test_b(world):
    assert "NARROW" not in os.environ
    assert os.environ["WIDE"] == "1"
