import pytest


@pytest.mark.ranks(1)
def test_a(module):
    pass


def test_plain():
    pass


@pytest.mark.ranks(1)
def test_elsewhere(module):
    pass
