"""The plugin of other plugins: each of theirs gets its part where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Generator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.other_plugins import PRELOADED
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal
    from lockstep.rank.session import RankSession

_BENCHMARK = (
    "the fixture `{name}` of pytest-benchmark does not work on ranks: each would choose its own number of "
    "rounds, and ranks would call their collectives unequally often. Run with --benchmark-disable, which "
    "calls the function once, or time it yourself and record it with `record_property`"
)
_SYRUPY = (
    "the fixture `{name}` of syrupy does not work on ranks: its snapshots are written and counted by one "
    "process. Compare with a value in the test, with inline-snapshot, or with pytest-regressions"
)
_REFUSED = {
    ("pytest_benchmark.plugin", "benchmark"): _BENCHMARK,
    ("pytest_benchmark.plugin", "benchmark_weave"): _BENCHMARK,
    ("syrupy", "snapshot"): _SYRUPY,
}
"""Reasons by module and name of a fixture's function."""

# In the controller


@pytest.hookimpl(trylast=True)  # conftests and other plugins have registered theirs
def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    config.pluginmanager.register(Unsupported())
    if _has(config, "pytest_timeout", "_get_item_settings"):
        from lockstep.features.other_plugins import timeout_internals

        config.pluginmanager.register(timeout_internals)
    if _has(config, "pytest_rerunfailures", "runtestprotocol"):
        from lockstep.features.other_plugins import rerunfailures_internals

        config.pluginmanager.register(rerunfailures_internals)


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    installed = {getattr(plugin, "__name__", "") for plugin, _ in config.pluginmanager.list_plugin_distinfo()}
    hints.append("lockstep.features.other_plugins.rank")
    if config.getoption("assertmode", "plain") == "rewrite" and not installed.isdisjoint(PRELOADED):
        hints.append("lockstep.features.other_plugins.preloaded")


def _has(config: pytest.Config, module: str, name: str) -> bool:
    """Return whether a module is registered that has a name which we use of it."""
    plugin = sys.modules.get(module)
    return hasattr(plugin, name) and config.pluginmanager.is_registered(plugin)


def pytest_ranks_worker(config: pytest.Config, worker: dict[str, Any]) -> None:
    if hasattr(config.option, "randomly_seed"):  # pytest-randomly has it passed on by pytest-xdist alone
        worker["randomly_seed"] = config.option.randomly_seed
    if hasattr(config.option, "random_order_seed"):  # pytest-random-order too
        worker["random_order_seed"] = config.option.random_order_seed
    manager = config.pluginmanager
    if manager.hasplugin("xdist"):
        # The attributes that plugins use of pytest-xdist's handle on a worker.
        node = SimpleNamespace(config=config, workerinput=worker, gateway=SimpleNamespace(id="master"))
        # Ranks are measured in another way, and pytest-cov has this hook only under `pytest -n`.
        without = [plugin for plugin in (manager.get_plugin("_cov"),) if plugin is not None]
        try:
            manager.subset_hook_caller("pytest_configure_node", without)(node=node)
        except Exception as error:
            raise LaunchError(
                "a plugin's hook `pytest_configure_node`, for workers of pytest-xdist and for ranks, failed: "
                f"{type(error).__name__}: {error}. Leave that plugin out with -p no:NAME"
            ) from error


class Unsupported:
    """Refuses tests on ranks that use such a feature, or notes at the end of the run that they did not."""

    def __init__(self) -> None:
        self._has_ranks = False

    def pytest_ranks_request(self, item: pytest.Item) -> Refusal | None:
        from lockstep.controller.pytest_internals import fixture_of
        from lockstep.controller.requests import Refusal

        for name in getattr(item, "fixturenames", ()):
            function = fixture_of(item, name)
            place = getattr(function, "__module__", ""), getattr(function, "__name__", "")
            why = _REFUSED.get(place, "")
            if why and not (why is _BENCHMARK and item.config.getoption("benchmark_disable", False)):
                return Refusal("failed", why.format(name=name))
        return None

    def pytest_ranks_session(self) -> None:
        self._has_ranks = True

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        wanted = set((getattr(config.option, "inline_snapshot", None) or "").split(","))
        if self._has_ranks and wanted & {"create", "fix", "fix-assert", "review", "trim", "update"}:
            terminalreporter.write_line(
                "inline-snapshot: snapshots in tests on ranks were compared, and not written: several "
                "processes would write the file. Write their values yourself, or create them in a test "
                "without ranks"
            )


# In a rank


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None:
        from lockstep.features.other_plugins.rank import plug_in

        plug_in(config, session.rank)
    return (yield)
