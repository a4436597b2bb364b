"""Private names of pytest that adoption uses, with what to look for when one moves. Seen in pytest 9.2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest


def fixture_functions(item: pytest.Item) -> Iterator[tuple[str, Any]]:
    """Yield the names and functions of the fixtures that an item uses.

    If it moves: what `pytest --fixtures-per-test` reads.
    """
    info = item._fixtureinfo  # type: ignore[attr-defined]
    for name, definitions in info.name2fixturedefs.items():
        yield name, definitions[-1].func


def tmp_path_factory(config: pytest.Config) -> pytest.TempPathFactory:
    """Return the factory of `tmp_path` and `tmpdir`; pytest-xdist uses the same attribute."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory


def skip_at_item(reason: str) -> NoReturn:
    """Skip a test at its own line, as its mark would."""
    __tracebackhide__ = True
    raise pytest.skip.Exception(reason, _use_item_location=True)
