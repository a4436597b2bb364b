"""A world whose rank 1 does not start."""

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(4)
def test_a(world):
    pass
