import pytest


@pytest.mark.ranks(2, backend="mpi")
def test_x(world):
    pass
