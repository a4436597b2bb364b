import pytest


@pytest.mark.ranks(2)
def test_below(world):
    world.barrier()
