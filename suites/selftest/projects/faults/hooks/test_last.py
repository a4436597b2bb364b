import pytest


@pytest.mark.ranks(2)
def test_last(world):
    world.barrier()
