"""Plugins of others in the session of a rank: what if they fail, and options of theirs for one process a run.

Runs inside a rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.other_plugins import FEATURE, Raised
from lockstep.output import MAX_MESSAGE, truncate
from lockstep.protocol import Warned

if TYPE_CHECKING:
    from lockstep.rank.process import Rank

MAX_RAISED = 10
"""Exceptions of a chain that are named."""
_OPTIONS: dict[str, Any] = {
    "session_timeout": float("inf"),
    # pytest-benchmark's, inline-snapshot's and syrupy's: ranks write no figures and no snapshots.
    **dict.fromkeys(("benchmark_disable", "disable_unused_snapshots"), True),
    **dict.fromkeys(("update_snapshots", "update_new_snapshots_only"), False),
    "inline_snapshot": "disable",
}
"""Values of options in ranks, where plugins have them."""


def plug_in(config: pytest.Config, rank: Rank) -> None:
    """Change what plugins of others do in a rank, before they are configured."""
    options = vars(config.option)
    options.update({name: value for name, value in _OPTIONS.items() if name in options})
    for name in filter(config.pluginmanager.hasplugin, ("rerunfailures", "pytest_rerunfailures")):
        config.pluginmanager.set_blocked(name)  # a rank that ran an item again would do so alone
        config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")
        config.pluginmanager.register(NamedErrors())
    left_out = LeftOut(rank, config.pluginmanager)
    left_out.guard(config, "pytest_configure")
    config.pluginmanager.register(left_out)


class LeftOut:
    """Leaves installed plugins out that fail as the session starts: the tests of ranks run without them.

    Conftests and plugins of the project itself are not left out: what they raise is its own fault.
    """

    def __init__(self, rank: Rank, manager: pytest.PytestPluginManager) -> None:
        self._manager = manager
        self._warnings = SentWarnings(rank, manager)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        return True  # of pytest-timeout: its limit is the deadline of the world

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.guard(session.config, "pytest_sessionstart")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # What fails there is of no test; the plugin's part in the controller goes on.
        for hook in ("pytest_sessionfinish", "pytest_unconfigure"):
            self.guard(session.config, hook)

    def guard(self, config: pytest.Config, hook: str) -> None:
        """Catch what installed plugins, and what they have registered, raise in the coming call of a hook."""
        found = self._manager.list_plugin_distinfo()
        installed = {_package_of(plugin): (self._manager.get_name(plugin), dist) for plugin, dist in found}
        # pluggy's records of the hook's functions: the class `HookImpl`, seen in 1.5 to 1.7.
        for implementation in getattr(config.hook, hook).get_hookimpls():
            if implementation.wrapper or implementation.hookwrapper:
                continue
            plugin = implementation.plugin
            if (of := installed.get(_package_of(plugin))) is not None:
                failed = partial(self._leave_out, plugin, *of)
                implementation.function = _guarded(implementation.function, failed)

    def _leave_out(self, plugin: object, option: str | None, dist: Any, error: Exception) -> None:
        self._manager.unregister(plugin)
        file = getattr(sys.modules.get(_module_of(plugin)), "__file__", None) or __file__
        # Its name and version are read from a file each time: 1 ms for each installed plugin.
        text = (
            f"the plugin {dist.project_name} {dist.version} fails in ranks and is left out there "
            f"({type(error).__name__}: {error}); -p no:{option} leaves it out of the run"
        )
        self._warnings.add(Warned("pytest", "PytestWarning", text, file, 1))


class SentWarnings:
    """Warnings that are sent with the next item, and a plugin until then."""

    def __init__(self, rank: Rank, manager: pytest.PytestPluginManager) -> None:
        self._rank, self._manager = rank, manager
        self._warnings: list[Warned] = []

    def add(self, warning: Warned) -> None:
        if not self._warnings:
            self._manager.register(self)
        self._warnings.append(warning)

    @pytest.hookimpl(tryfirst=True)
    def pytest_ranks_begin(self) -> None:
        self._manager.unregister(self)
        while self._warnings:
            self._rank.wire.post(self._warnings.pop(0))


class NamedErrors:
    """Adds to the report of a failure what was raised, for pytest-rerunfailures in the controller."""

    def pytest_ranks_failed(self, error: BaseException, parts: dict[str, Any]) -> None:
        parts[FEATURE] = _names(error)


def _names(raised: BaseException) -> tuple[Raised, ...]:
    """Return the classes and texts of an exception and of those that it came from, outermost first."""
    error: BaseException | None = raised
    named: list[Raised] = []
    while error is not None and len(named) < MAX_RAISED:  # a chain may be a circle
        classes = [each for each in type(error).__mro__ if issubclass(each, BaseException)]
        names = tuple((each.__module__, each.__qualname__) for each in classes)
        try:
            text = str(error)
        except BaseException:  # of the user's class
            text = ""
        named.append((names, truncate(text, MAX_MESSAGE), error.__cause__ is not None))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return tuple(named)


def _module_of(plugin: object) -> str:
    return plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__


def _package_of(plugin: object) -> str:
    return _module_of(plugin).partition(".")[0]


def _guarded(function: Callable[..., object], failed: Callable[[Exception], None]) -> Callable[..., object]:
    def call(*args: object) -> object:
        try:
            return function(*args)
        except Exception as error:  # pytest.exit and the like are no Exception: they are meant
            failed(error)
            return None

    return call
