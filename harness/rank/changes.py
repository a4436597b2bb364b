"""Comparing two moments of a rank's state: what has changed, and what must change back."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class State:
    """State at one moment, in fields whose names are read by people."""

    def changes(self, now: Self) -> list[str]:
        """Describe how `now` differs from this state, one line for each difference."""
        lines: list[str] = []
        for field in fields(self):
            before, after = getattr(self, field.name), getattr(now, field.name)
            if isinstance(before, State):
                lines += before.changes(after)
            elif before != after:
                lines.append(_describe(field.name.replace("_", " "), before, after))
        return [line for line in lines if line]

    def with_changes(self, before: Self, now: Self) -> Self:
        """Return this state with what differs between the two others."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            old, new = getattr(before, field.name), getattr(now, field.name)
            if old != new:
                changes[field.name] = _fold(getattr(self, field.name), old, new)
        return replace(self, **changes)


def _describe(name: str, before: Any, after: Any) -> str:
    match before:
        case dict():
            changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
            return f"{name}: {', '.join(sorted(map(os.fsdecode, changed)))}"
        case frozenset():
            return _describe_groups(before, after)
        case tuple() if name == "sys path":
            new, gone = [p for p in after if p not in before], [p for p in before if p not in after]
            words = [*(f"{path} added" for path in new), *(f"{path} removed" for path in gone)]
            # Another order alone is put back without a word: pytest makes one as it sets up a package.
            return f"{name}: {', '.join(words)}" if words else ""
        case str() if name == "locale":
            return f"{name}: {'; '.join(sorted({*after.split(';')} - {*before.split(';')}))}"
        case _:
            return f"{name}: {after} (was {before})"


def _describe_groups(before: frozenset[str], after: frozenset[str]) -> str:
    if any(group.startswith("default_pg") for group in before - after):
        return "no default process group (the next test gets a new world)"
    # A mesh makes groups and offers no way to destroy them: those go without a word.
    left = sorted(group for group in after - before if not group.startswith("mesh"))
    return f"{len(left)} process group(s)" if left else ""


def _fold(value: Any, old: Any, new: Any) -> Any:
    """Apply to a value what differs between two others: item by item where it is a collection."""
    match value:
        case State():
            return value.with_changes(old, new)
        case dict():
            kept = {key: item for key, item in value.items() if key not in old or key in new}
            return kept | {key: item for key, item in new.items() if old.get(key) != item}
        case frozenset():
            return (value - (old - new)) | (new - old)
        case _:
            return new
