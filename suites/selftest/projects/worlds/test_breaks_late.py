"""A session fixture that breaks as its world closes."""

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="session")
def breaks_late():
    yield
    assert False, "closing"


@pytest.mark.ranks(1)
def test_a(world, breaks_late):
    pass


@pytest.mark.parametrize("i", range(2))
@pytest.mark.ranks(2, 3)
def test_crowds_it_out(world, i):
    pass


@pytest.mark.ranks(1)
def test_b(world):
    pass
