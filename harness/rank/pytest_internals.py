"""Private names of pytest that a rank uses, each with what to look for when it moves. Seen in pytest 9.2.

Runs inside a rank; imports pytest alone.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import types
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from _pytest import capture
from _pytest import config as pytest_config
from _pytest._code.code import filter_traceback
from _pytest.assertion.rewrite import assertstate_key
from _pytest.config import get_config as get_config
from _pytest.fixtures import FixtureFunctionDefinition, FixtureManager
from _pytest.logging import LogCaptureHandler, catching_logs
from _pytest.reports import pytest_report_to_serializable

FOLDER = "/_pytest/"
"""Part of the path of every file of pytest's own."""

# The capture of one file descriptor: `targetfd`, `tmpfile`, `start()`, `done()`. Subtests and `capfd`
# make one in the middle of a test, and pytest has no way to choose its file. If it moves: the base of
# `FDCapture`.
FD_CAPTURE: Any = capture.FDCaptureBase

serialise_report = pytest_report_to_serializable
"""pytest's own implementation of the hook, which knows `TestReport` and `CollectReport`."""

TAKES_NOTHING = sys.maxsize
"""The level of a handler that takes no record."""

is_of_user = filter_traceback
"""Return whether pytest shows an entry of a traceback: it is not pytest's own, nor pluggy's."""


def set_root(rootdir: Path, inifile: Path | None) -> None:
    """Give the pytest session that starts next this rootdir and ini file, whatever its arguments are.

    pytest finds them by the arguments that exist, among them values of options that plugins add: a folder
    that the run has made for `--timeline DIR` would change them.

    If it moves: what `Config.parse` finds the rootdir by.
    """
    patched: Any = pytest_config
    find = patched.determine_setup

    def determine_setup(**given: Any) -> tuple[Any, ...]:
        patched.determine_setup = find  # a test may start other sessions
        # A file that is not regular has no configuration, and no other one is looked for.
        given.update(inifile=str(inifile or os.devnull), args=[], rootdir_cmd_arg=None)
        _, _, *others = find(**given)
        return (rootdir, inifile, *others)

    patched.determine_setup = determine_setup


def use_config(config: pytest.Config) -> None:
    """Let the pytest session that starts next have this config, with the options of pytest's own plugins.

    Not where its arguments block one of these: the options of that are free for other plugins then. No plugin
    replaces the cache, which is blocked to leave no files, unless it is named again.

    If it moves: what makes the config in `_prepareconfig`.
    """
    patched: Any = pytest_config
    make = patched.get_config

    def get_config(args: Sequence[str], plugins: Any, **others: Any) -> Any:
        patched.get_config = make  # a test may start other sessions
        words = {word.removeprefix("-p").strip() for word in args}
        own = pytest_config.default_plugins
        changed = words & {*own, *(f"no:{name}" for name in own if name != "cacheprovider")}
        if changed or "PYTEST_DEBUG" in os.environ:  # which the server's own streams would show
            return make(args, plugins, **others)
        given: Any = config
        given.invocation_params = pytest.Config.InvocationParams(args=args, plugins=plugins, dir=Path.cwd())
        config.pluginmanager.consider_preparse(args, exclude_only=True)
        return config

    patched.get_config = get_config


def expect_plugins(to_rewrite: Collection[str]) -> None:
    """Let pytest rewrite the asserts of these, and not read the list of files of each package for them.

    It took 17 ms of each rank, and warned of plugins that the server has imported, as torch's modules for
    tests import hypothesis: where warnings are errors, no rank would start.

    If it moves: what gives the hook for imports the names of all plugins that are installed.
    """

    def take_names(config: Any, hook: Any, *_: Any, **__: Any) -> None:
        config.pluginmanager.rewrite_hook = hook
        hook._must_rewrite.update(to_rewrite)

    patched: Any = pytest_config.Config
    patched._mark_plugins_for_rewrite = take_names


def manage_fixtures_quickly() -> None:
    """Let the pytest session that starts next look for fixtures only in plugins that have some: 5 of 90.

    That was a seventh of a rank's start. Of a module among these it looks at its fixtures alone, another
    tenth, and does not warn of what resembles one, as the controller has. Nor does it sort items by their
    fixtures, a sixth of collecting: the controller orders them.

    If it moves: what reads the fixtures of each plugin as it is registered, and sorts items.
    """
    patched: Any = FixtureManager
    make, registered = patched.__init__, patched.pytest_plugin_registered

    def pytest_plugin_registered(self: Any, plugin: object, plugin_name: str) -> None:
        is_conftest = bool(plugin_name) and plugin_name.endswith("conftest.py")
        holder = plugin if is_conftest else holder_of_fixtures(plugin)
        if holder is not None:
            registered(self, holder, plugin_name)

    def holder_of_fixtures(plugin: object) -> object | None:
        # Of a module its own names, of an object those of its type, as pytest has it.
        of_object = plugin if isinstance(plugin, type) else type(plugin)
        holders = [plugin] if isinstance(plugin, types.ModuleType) else of_object.__mro__
        if any("__dir__" in vars(holder) for holder in holders if holder is not object):
            return plugin
        found = {
            name: value
            for holder in holders
            for name, value in vars(holder).items()
            if type(value.__func__ if type(value) is staticmethod else value) is FixtureFunctionDefinition
            # `isinstance` would ask each object for its class, and that of a proxy may raise anything.
        }
        if not (found and isinstance(plugin, types.ModuleType)):
            return plugin if found else None
        module = types.ModuleType(plugin.__name__)
        vars(module).update(found)
        return module

    def pytest_collection_modifyitems(self: Any) -> None:
        pass

    def __init__(self: Any, session: pytest.Session) -> None:
        patched.__init__ = make  # a test may start other sessions
        with pytest.MonkeyPatch.context() as patch:  # the manager registers itself as a plugin
            for hook in (pytest_plugin_registered, pytest_collection_modifyitems):
                patch.setattr(patched, hook.__name__, hook)
            make(self, session)

    patched.__init__ = __init__


def attach_log_handlers_quickly() -> None:
    """Attach pytest's handlers of log records to loggers as pytest does, in a tenth of the time.

    In every phase pytest (since 9.2) adds two handlers to each logger that does not propagate, and removes
    them, by calls that take a lock. torch has 43 such loggers: a seventh of what a small test cost its rank.
    Here the two stay attached, and take no record between phases. The handler of a subtest, which is used
    once, does not stay.
    If it moves: the class that `LoggingPlugin._runtest_for` enters.
    """
    if "attached_loggers" not in getattr(catching_logs, "__slots__", ()):
        return  # before 9.2: the root's handlers alone

    entered: list[Any] = []  # without a `leave` since
    resting: dict[object, tuple[int, list[Any]]] = {}  # level of a handler, and loggers that have it
    used: WeakSet[Any] = WeakSet()  # handlers that have been attached before

    def enter(self: Any) -> Any:
        handler, root = self.handler, logging.root
        if entered and type(entered[-1].handler) is type(handler) is LogCaptureHandler:
            self.attached_loggers = entered[-1].attached_loggers  # of the other one of this phase
        else:
            known = [*root.manager.loggerDict.values()]
            # Placeholders, for loggers that only have children, do not have the attribute.
            self.attached_loggers = [root, *(each for each in known if not getattr(each, "propagate", True))]
        entered.append(self)
        if handler in resting:
            handler.level, before = resting.pop(handler)
            if before != self.attached_loggers:
                detach(handler, before)
        for logger in self.attached_loggers:
            if handler not in logger.handlers:
                logger.handlers.append(handler)
        if self.level is not None:
            handler.setLevel(self.level)
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return handler

    def leave(self: Any, *raised: object) -> None:
        entered.clear()
        if self.level is not None:
            logging.root.setLevel(self.orig_level)
        if type(self.handler) is LogCaptureHandler and self.handler in used:
            resting[self.handler] = self.handler.level, self.attached_loggers
            self.handler.level = TAKES_NOTHING
        else:
            detach(self.handler, self.attached_loggers)
            used.add(self.handler)
        self.attached_loggers = []

    def detach(handler: Any, loggers: list[Any]) -> None:
        for logger in loggers:
            if handler in logger.handlers:
                logger.handlers.remove(handler)

    patched: Any = catching_logs
    patched.__enter__, patched.__exit__ = enter, leave


def tear_down_except_for(item: pytest.Item) -> None:
    """Tear down the fixtures and collectors that are set up and that the item does not need.

    If it moves: what pytest's own `pytest_runtest_teardown` does for its `nextitem`.
    """
    item.session._setupstate.teardown_exact(item)


def set_location(item: pytest.Item, location: tuple[str, int | None, str]) -> None:
    """Set what `item.location` would compute; that looks into the source, for 3 % of what a small test costs.

    If it moves: a property of `Item` that keeps its value in the item.
    """
    if isinstance(vars(pytest.Item).get("location"), functools.cached_property):
        vars(item)["location"] = location


def forget_ended_dependents(fixture: pytest.FixtureDef[Any]) -> None:
    """Drop what a living fixture would do, when it ends, to fixtures that requested it and have ended before.

    pytest keeps that, with the request of each test, until the fixture ends: one of the session ends with
    the last test. If it moves: where `FixtureDef.execute` adds to the finalizers of what it requests.
    """
    fixture._finalizers[:] = [
        each
        for each in fixture._finalizers
        if not (
            isinstance(each, functools.partial)
            and isinstance(dependent := getattr(each.func, "__self__", None), pytest.FixtureDef)
            and dependent.cached_result is None
        )
    ]


def captured_sections(item: pytest.Item) -> list[tuple[str, str, str]]:
    """Return the list of (phase, kind, text) from which the sections of the item's reports are made."""
    return item._report_sections


def set_argument(session: pytest.Session, argument: Path) -> None:
    """Let files outside of the rootdir have the ids that they have where pytest was given this argument.

    In the rootdir ids need no argument. There the file stays one, as it is collected whatever its name is,
    and its asserts are rewritten.

    If it moves: what the constructor of `FSCollector` makes a node id of; and `pytest_collection` of pytest's
    plugin for asserts, which is not called in ranks.
    """
    root = session.config.rootpath
    inside = {path for path in session._initialpaths if path.is_relative_to(root)}
    session._initialpaths = frozenset({argument, *inside})
    state = session.config.stash.get(assertstate_key, None)
    if state is not None and state.hook is not None:
        state.hook.set_session(session)


def waiting_conftests(session: pytest.Session) -> dict[Path, object]:
    """Return the conftests that wait for the collection of their directory, since pytest 9.1."""
    waiting: dict[Path, object] = getattr(session._fixturemanager, "_pending_conftests", {})
    return waiting
