"""A wide fixture that breaks as its world closes, after a test with several failed subtests."""

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.fixture(scope="session")
def breaks_late():
    yield
    assert False, "closing"


def test_subtests(world, breaks_late, subtests):
    for name in "abc":
        with subtests.test(name):
            assert world.rank == 0, "as it should"


def test_next(world):
    pass
