import pytest

pytestmark = pytest.mark.ranks(3, 5)


def test_of_the_module(world):
    pass


@pytest.mark.ranks(2)
class TestClass:
    def test_of_the_class(self, world):
        pass

    @pytest.mark.parametrize("n", [1])
    def test_parametrized(self, world, n):
        pass

    @pytest.mark.ranks(4, 6)
    def test_of_the_function(self, world):
        pass


@pytest.mark.ranks(2, 8)
class TestDerived(TestClass):
    pass


class TestInheriting(TestDerived):
    pytestmark = pytest.mark.filterwarnings("ignore")

    def test_of_the_class(self, world):
        pass
