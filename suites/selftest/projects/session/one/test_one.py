import pytest


@pytest.mark.ranks(2)
def test_one(where):
    assert where == "one"
