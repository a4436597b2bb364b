import pytest

pytest.importorskip("no_such_module")


@pytest.mark.ranks(2)
def test_never(world):
    pass
