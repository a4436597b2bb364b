"""The fronts that are compiled, and a model of blocks."""

import pytest

from lockstep.hookspecs import RANK_PLUGIN


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "inductor: compiles C++ code, for minutes; selected by `-m inductor` or `-k inductor` alone",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Deselect claims about inductor, unless the run names it."""
    option = config.option
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return  # a rank runs what its controller has chosen
    if "inductor" in f"{option.markexpr} {option.keyword}" or any("::" in arg for arg in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("inductor")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(params=["FULL_SHARD-orig", "fully_shard", "replicate"])
def front(engine, fronts, request):
    """Each of the three fronts that can be compiled."""
    from lockstep.conformance import Capability, require

    require(engine, Capability.COMPILED)
    return fronts[request.param]
