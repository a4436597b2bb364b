"""The private names of pytest that both sides use, seen in pytest 9.0 to 9.2. Must not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fixtures_below(item: pytest.Item, names: Iterable[str]) -> list[str]:
    """Return the fixtures that an item needs for some of its own, each behind those that it requests.

    If it moves: `FuncFixtureInfo.name2fixturedefs` of a function's item, and `FixtureDef.argnames`.
    """
    definitions: dict[str, Any] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    found: dict[str, bool] = {}

    def visit(name: str) -> None:
        if name not in found:
            found[name] = False
            for definition in definitions.get(name, ()):  # one that overrides another may request it
                for requested in definition.argnames:
                    visit(requested)
            del found[name]
            found[name] = True

    for name in names:
        visit(name)
    return [*found]


def is_xfail_call(report: pytest.TestReport) -> bool:
    """Return whether a phase ended by `pytest.xfail()`; reports show it in the exception's name alone."""
    crash = getattr(report.longrepr, "reprcrash", None)
    name = str(crash.message).partition(":")[0] if crash is not None else ""
    return hasattr(report, "wasxfail") and name.split(".")[-1] == "XFailed"
