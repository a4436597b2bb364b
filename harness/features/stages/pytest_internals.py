"""The private names of pytest that the item of a stage is made of, seen in pytest 9.2. Used on both sides."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any, cast

import pytest


def fixtures_below(item: pytest.Item, names: Iterable[str]) -> list[str]:
    """Return the fixtures that an item needs for some of its own, each behind those that it requests.

    If it moves: `FuncFixtureInfo.name2fixturedefs` of a function's item, and `FixtureDef.argnames`.
    """
    definitions: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name not in found:
            found[name] = None
            for definition in definitions.get(name, ()):  # one that overrides another may request it
                for requested in definition.argnames:
                    visit(requested)
            del found[name]
            found[name] = None

    for name in names:
        visit(name)
    return [*found]


def make_stage(item: pytest.Item, name: str) -> pytest.Item:
    """Return an item that runs a stage of a test, by the name of its fixture, in the place of the test.

    It has the parameters and the marks of the test; of its fixtures those that the stage needs, and those of
    autouse. If it moves: `FuncFixtureInfo`, what `FixtureManager.getfixtureinfo` makes for each function.
    """
    test = cast("Any", item)
    info, session = test._fixtureinfo, test.session
    of_stage = info.name2fixturedefs[name][-1]
    function = of_stage.func.stage.function
    if hasattr(of_stage.func, "__self__"):  # a method
        function = function.__get__(test.instance)
    parameters = inspect.signature(function).parameters
    argnames = tuple(each for each in of_stage.argnames if each in parameters)
    of_all = session._fixturemanager.getfixtureinfo(test.parent, None, None).initialnames
    wanted = [each for each in of_all if name not in fixtures_below(item, [each])]
    needed = {*fixtures_below(item, [*wanted, *argnames])}
    made: Any = pytest.Function.from_parent(
        test.parent,
        name=f"{test.originalname}::{name}{test.name.removeprefix(test.originalname)}",
        originalname=f"{test.originalname}::{name}",
        callspec=getattr(test, "callspec", None),
        callobj=function,
        fixtureinfo=dataclasses.replace(
            info,
            argnames=argnames,
            initialnames=(*wanted, *argnames),
            names_closure=[each for each in info.names_closure if each in needed],
            name2fixturedefs={**info.name2fixturedefs},
        ),
    )
    made.reportinfo = item.reportinfo  # where its mark `skip` is
    # A stage that passes is no failure of a test that must fail.
    expected = [
        pytest.mark.xfail.with_args(*mark.args, **{**mark.kwargs, "strict": False}).mark
        for mark in item.iter_markers("xfail")
    ]
    made.own_markers = expected + [mark for mark in item.own_markers if mark.name != "xfail"]
    return cast("pytest.Item", made)
