import pytest


@pytest.fixture
def model(world):
    pass


class TestC:
    def test_x(self, model):
        pass
