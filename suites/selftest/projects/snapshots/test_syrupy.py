import pytest


@pytest.mark.ranks(2)
def test_on_ranks(world, snapshot):
    assert snapshot == [1]


def test_plain(snapshot):
    assert snapshot == [1]
