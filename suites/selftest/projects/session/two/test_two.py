import pytest


@pytest.mark.ranks(2)
def test_two(where):
    assert where == "two"
