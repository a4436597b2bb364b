"""The entries of all files of entries, their layouts, and the modules of plans with edits."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from bug import Bug

HERE = Path(__file__).parent
PLANS = (HERE, HERE.parents[1] / "examples" / "layouts")
ENTRIES = ("reductions", "losses", "norms", "modules", "unseen")
"""Files of entries; the last one is there if someone has written it."""


def all_bugs() -> list[Bug]:
    """Return all entries."""
    bugs = [bug for name in ENTRIES for bug in bugs_of(name)]
    names = [bug.name for bug in bugs]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return bugs


def bugs_of(name: str) -> list[Bug]:
    """Return those of one file, none if there is no such file."""
    return list(importlib.import_module(name).BUGS) if (HERE / f"{name}.py").exists() else []


def right_plans(bugs: list[Bug]) -> list[Bug]:
    """Return an entry without edits for each plan, on all layouts on which bugs are planted in it."""
    layouts: dict[tuple[Any, ...], list[str]] = {}
    for bug in bugs:
        names = layouts.setdefault((bug.plan, bug.model, bug.shards, bug.microbatches), [])
        names += [name for name in bug.layouts.split() if name not in names]
    return [
        Bug(
            *(f"right: {' '.join(filter(None, (plan, model, shards)))} {micro}", "", []),
            layouts=" ".join(names),
            plan=plan,
            model=model,
            shards=shards,
            microbatches=micro,
        )
        for (plan, model, shards, micro), names in layouts.items()
    ]


def sizes_of(layout: str) -> dict[str, int]:
    """Return the axes of "dp2-tp2"."""
    return {axis: int(size) for axis, size in re.findall(r"([a-z_]+)(\d+)", layout)}


def find(dotted: str) -> Any:
    """Return an attribute of a module, by "module.name"."""
    module, name = dotted.split(".")
    return getattr(importlib.import_module(module), name)


def edited(bug: Bug) -> dict[str, str]:
    """Return the sources of the modules that a bug edits, with its edits."""
    sources: dict[str, str] = {}
    for module, before, after in bug.edits:
        path = next(folder / f"{module}.py" for folder in PLANS if (folder / f"{module}.py").exists())
        source = sources.get(module) or path.read_text()
        if source.count(before) != 1:  # an AssertionError would be taken for a report
            raise ValueError(f"{bug.name}: {source.count(before)} times {before!r} in {path}")
        sources[module] = source.replace(before, after)
    return sources


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Import modules of plans again, with the edits of a bug."""
    names = {path.stem for folder in PLANS for path in folder.glob("*.py")} - {
        "bug",
        "files",
        "places",
        *ENTRIES,
    }
    kept = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.meta_path.insert(0, finder := _Edited(edited(bug)))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


class _Edited(MetaPathFinder, Loader):
    """Finds modules that have edits."""

    def __init__(self, sources: dict[str, str]) -> None:
        self._sources = sources

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in self._sources else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._sources[module.__name__], f"<{module.__name__}, edited>", "exec"), vars(module))
