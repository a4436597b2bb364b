import pytest


@pytest.mark.ranks(2)
def test_generate(world):
    world.barrier()
