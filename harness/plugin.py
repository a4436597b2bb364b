"""The pytest plugin: options, the `ranks` marker, fixtures. Every pytest run loads it; must not import torch.

Everything else is delegated: to `controller` in the process that the user started, to `rank` in a rank.

PYTEST_DONT_REWRITE: in a rank the server has imported it before pytest could rewrite its asserts.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lockstep import feature_hooks, hookspecs
from lockstep.features import register_features
from lockstep.fixtures import collectives, run_subtests, world
from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN
from lockstep.options import SHORT, add_long_names, add_options, add_short_options

__all__ = ["collectives", "run_subtests", "world"]


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)
    pluginmanager.add_hookspecs(feature_hooks)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add_options(parser)
    register_features(pluginmanager)
    for options in pluginmanager.hook.pytest_ranks_short_options():
        add_long_names(parser, options)
    config = pluginmanager.get_plugin("pytestconfig")
    options = getattr(config, "known_args_namespace", None)  # None where a rank's config has no arguments yet
    if config is None or (options is not None and options.confcutdir is not None):  # a conftest has named it
        _add_short_options(parser, pluginmanager)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, object, object]:
    """Add the options whose names are free once conftests and other plugins have added theirs."""
    result = yield
    _add_short_options(parser, early_config.pluginmanager)
    return result


def _add_short_options(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    from lockstep.controller.pytest_internals import option_names

    for options in (SHORT, *pluginmanager.hook.pytest_ranks_short_options()):
        add_short_options(parser, options, option_names(parser))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend=None, fresh=False, timeout=None, group=True, needs=('values',)): run the test "
        "on that many ranks, one item for each size; on `backend`, in new processes if `fresh`, within "
        "`timeout` seconds; without a default process group if not `group`; on no other backend that lacks "
        "what it `needs`. The nearest mark wins.",
    )
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    from lockstep.controller.option_checks import check_options
    from lockstep.controller.plugin import Controller
    from lockstep.reporting import summary

    check_options(config)  # also under `pytest -n`, where each worker would only crash on a wrong one
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(summary, "harness-summary")
    if is_worker or getattr(config.option, "dist", "no") == "no":  # the main process of -n runs no tests
        config.pluginmanager.register(Controller(config), CONTROLLER_PLUGIN)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item of each size of the mark; refuse a wrong mark, and `world` without one."""
    from lockstep.marker import MarkError, read_mark

    mark, wrong = None, ""
    try:
        mark = read_mark(metafunc.definition)
    except MarkError as error:
        wrong = str(error)
    if mark is None and not wrong:
        from lockstep.controller.pytest_internals import name_of_world

        if name := name_of_world(metafunc):
            wrong = (
                f"the fixture `{name}` exists only on ranks: mark the test, its class or its module with "
                "pytest.mark.ranks(2)"
            )
    if wrong:
        pytest.fail(f"{metafunc.definition.nodeid}: {wrong}", pytrace=False)
    if mark is None or metafunc.config.hook.pytest_ranks_items(metafunc=metafunc, mark=mark):
        return
    if len(mark.sizes) > 1:
        metafunc.fixturenames.append("ranks_size")
        ids = [f"{size}-rank" if size == 1 else f"{size}-ranks" for size in mark.sizes]
        metafunc.parametrize("ranks_size", mark.sizes, ids=ids)
