"""Fixtures that fail in tear-down, in the controller and on ranks."""

import pytest


@pytest.fixture(scope="module")
def wide():
    yield
    raise ValueError("wide")


@pytest.fixture
def narrow():
    yield
    raise KeyError("narrow")


def test_wide(wide):
    pass


@pytest.mark.ranks(1)
def test_narrow(narrow):
    pass
