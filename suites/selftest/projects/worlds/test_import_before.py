"""A test with a short deadline, before a file that is slow to import."""

import pytest

pytestmark = pytest.mark.ranks(2)


@pytest.mark.ranks(2, timeout=1)
def test_quick(world):
    world.barrier()
