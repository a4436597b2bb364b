"""`import harness` gives the modules of `lockstep`, unless a project has a `harness` of its own.

Our modules are always named `lockstep.x`. Standard library only.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve_harness() -> None:
    """Put the package that `import harness` gives into `sys.modules`; called while ours is imported."""
    if theirs := _other_package():
        sys.modules["harness"] = module_from_spec(theirs)
        if theirs.loader is not None:  # as that of a folder without `__init__.py` is
            theirs.loader.exec_module(sys.modules["harness"])
    else:
        sys.modules["harness"] = sys.modules["lockstep"]
        sys.meta_path.insert(0, _HarnessFinder())


def come_first() -> None:
    """Move our finder before pytest's, which would load `harness.x` from its file, a second time."""
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, _HarnessFinder))


def _other_package() -> ModuleSpec | None:
    """Return the spec of a `harness` that comes after ours on the path, or that another finder knows."""
    entries = [entry for entry in sys.path if not _is_ours(Path(entry, "harness"))]
    for finder in sys.meta_path:
        spec = finder.find_spec("harness", entries if finder is PathFinder else None)
        if spec is not None:
            folders = [Path(each) for each in spec.submodule_search_locations or ()]
            if not any(map(_is_ours, folders)) and (spec.origin or any(map(_has_modules, folders))):
                return spec
    return None


def _is_ours(folder: Path) -> bool:
    return (folder / Path(__file__).name).exists() and (folder / "hookspecs.py").exists()


def _has_modules(folder: Path) -> bool:
    return any(not path.name.startswith(("test_", "conftest.")) for path in folder.glob("*.py"))


class _HarnessFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        # `harness.__main__` is a program: it is found in the folder, as any other.
        is_module = name.startswith("harness.") and name != "harness.__main__"
        return ModuleSpec(name, self) if is_module else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(f"lockstep.{module.__name__.removeprefix('harness.')}")
