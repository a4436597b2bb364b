import pytest


@pytest.fixture
def where():
    return "two"
