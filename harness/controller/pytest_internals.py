"""The private names of pytest that the controller uses, seen in pytest 9.0 to 9.2.

Used where tests are collected and in the controller; must not import torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest

from lockstep.hookspecs import ONLY_ON_RANKS


def fixture_function(metafunc: pytest.Metafunc, name: str) -> Callable[..., object] | None:
    """Return the function of the fixture that a test gets under a name; None if that cannot be found out.

    If it moves: what `Metafunc` gets from `FuncFixtureInfo.name2fixturedefs`, the last of a name overrides.
    """
    definitions = getattr(metafunc, "_arg2fixturedefs", {}).get(name)
    function: Callable[..., object] | None = definitions[-1].func if definitions else None
    return function


def marks_of_parameters(metafunc: pytest.Metafunc) -> list[pytest.Mark]:
    """Return the marks of the parameters that a test has got so far.

    If it moves: what `Metafunc.parametrize` adds to.
    """
    return [mark for call in getattr(metafunc, "_calls", ()) for mark in call.marks]


def fixture_of(item: pytest.Item, name: str) -> Callable[..., object] | None:
    """Return the function of the fixture that an item gets under a name; None if that cannot be found out.

    If it moves: `FuncFixtureInfo.name2fixturedefs` of a function's item.
    """
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {}).get(name)
    function: Callable[..., object] | None = definitions[-1].func if definitions else None
    return function


def tear_down(item: pytest.Item, nextitem: pytest.Item | None) -> pytest.CallInfo[None]:
    """Tear down all fixtures in this process that `nextitem` does not need; return how that went.

    If it moves: what `_pytest.runner.pytest_runtest_teardown` calls.
    """
    state = item.session._setupstate
    return pytest.CallInfo.from_call(lambda: state.teardown_exact(nextitem), when="teardown")


def add_failed_tear_down(
    item: pytest.Item, call: pytest.CallInfo[None], reports: list[pytest.TestReport]
) -> None:
    """Add to reports of an item that `tear_down` failed."""
    # Not by the hook: plugins expect it for the other phases first, which ranks have made reports of.
    failed = pytest.TestReport.from_item_and_call(item, call)
    if reports[-1].failed:  # what went wrong on ranks is reported too
        reports.append(failed)
    else:
        reports[-1].outcome, reports[-1].longrepr = failed.outcome, failed.longrepr


def basetemp_of(config: pytest.Config) -> Path:
    """Return the directory that this run's `tmp_path`s are in.

    If it moves: where the fixture `tmp_path_factory` is taken from; pytest-xdist uses the same attribute.
    """
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory.getbasetemp()


def option_names(parser: pytest.Parser) -> set[str]:
    """Return the names of all command-line options that were added so far.

    If it moves: what `Parser.getgroup` looks through, and the group of options that were added without one.
    """
    groups: list[Any] = [*getattr(parser, "_groups", ()), getattr(parser, "_anonymous", None)]
    return {
        name for group in groups if group is not None for option in group.options for name in option.names()
    }


def option_groups(config: pytest.Config) -> Mapping[argparse.Action, str]:
    """Return every command-line option with the name of its group; empty where pytest keeps them elsewhere.

    If it moves: what `Parser.getgroup` looks through.
    """
    groups: list[Any] = getattr(config._parser, "_groups", [])
    return {
        action: group.name
        for group in groups
        for action in getattr(getattr(group, "_arggroup", None), "_group_actions", ())
    }


def modules_to_rewrite(config: pytest.Config) -> tuple[str, ...]:
    """Return the modules and packages, of plugins above all, whose asserts pytest is to rewrite.

    If it moves: what `pytest.register_assert_rewrite` adds a name to.
    """
    return tuple(sorted(getattr(config.pluginmanager.rewrite_hook, "_must_rewrite", ())))


def terminal_stream(config: pytest.Config) -> TextIO:
    """Return the stream that pytest's terminal report is written to, past all capture.

    If it moves: what `TerminalWriter` is made with.
    """
    stream: TextIO = config.get_terminal_writer()._file
    return stream


def make_report(item: pytest.Item, when: str, outcome: str, longrepr: object = None) -> pytest.TestReport:
    """Return a report of a phase that did not run in this process. The constructor is not documented."""
    keywords = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, keywords, outcome, longrepr, when)  # type: ignore[arg-type]


def name_of_world(metafunc: pytest.Metafunc) -> str | None:
    """Return the name under which a test that nothing puts on ranks uses our fixture `world`, or another.

    A project may have its own fixture of that name.
    """
    if any(mark.name == "ranks" for mark in marks_of_parameters(metafunc)):  # pytest.param(..., marks=...)
        return None
    for name in metafunc.fixturenames:
        function = fixture_function(metafunc, name)
        module, function_name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
        if (module, function_name) == ("lockstep.fixtures", "world"):
            return name
        if getattr(function, ONLY_ON_RANKS, False) is True:
            return name
    return None
