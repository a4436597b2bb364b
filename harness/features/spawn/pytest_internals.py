"""Private names of pytest by which processes of tests have rewritten asserts. Seen in pytest 9.2.

Used in the controller and in processes of tests.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import AssertionState
from _pytest.assertion.rewrite import AssertionRewritingHook, assertstate_key


def rewritten_modules(config: pytest.Config) -> tuple[str, ...]:
    """Return the names of the modules of which pytest has rewritten the asserts in this process."""
    state: Any = config.stash.get(assertstate_key, None)
    return () if state is None or state.hook is None else tuple(state.hook._rewritten_names)


def rewrite_asserts_of(names: Collection[str]) -> None:
    """Rewrite the asserts of those modules where they are imported from now on; there is no session here."""
    if names:
        sys.meta_path.insert(0, _Hook(frozenset(names)))


class _Hook(AssertionRewritingHook):
    """A hook without a session. If it moves: what `install_importhook` makes."""

    def __init__(self, names: frozenset[str]) -> None:
        trace = SimpleNamespace(root=SimpleNamespace(get=lambda name: lambda *args: None))
        config: Any = SimpleNamespace(
            stash=pytest.Stash(), trace=trace, getini=lambda name: [] if name == "python_files" else False
        )
        config.stash[assertstate_key] = AssertionState(config, "rewrite")
        super().__init__(config)
        self._names = names

    def _is_marked_for_rewrite(self, name: str, state: AssertionState) -> bool:
        return name in self._names

    def _should_rewrite(self, name: str, fn: str, state: AssertionState) -> bool:
        return name in self._names
