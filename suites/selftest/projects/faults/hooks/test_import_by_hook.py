import pytest


@pytest.mark.ranks(2)
def test_import_by_hook(world):
    world.barrier()
