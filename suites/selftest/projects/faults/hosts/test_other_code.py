"""A file that is another one on host b."""

import pytest


@pytest.mark.ranks(2, hosts=2)
def test_it(world):
    """Never runs on b."""


@pytest.mark.ranks(2)
def test_on_one_host(world):
    assert world.gather(world.rank) == [0, 1]
