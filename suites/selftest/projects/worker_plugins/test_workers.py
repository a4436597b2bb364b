import pytest


@pytest.fixture
def worker_input(world, pytestconfig):
    has_xdist = pytestconfig.pluginmanager.hasplugin("xdist")
    assert pytestconfig.option.randomly_seed == 12345
    assert pytestconfig.workerinput.get("port") == (4711 if has_xdist else None)
    open(f"seen-{world.rank}-{'xdist' if has_xdist else 'none'}.txt", "a").write("once")


@pytest.mark.ranks(2)
def test_input(worker_input):
    pass
