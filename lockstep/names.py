"""The two import names of one set of modules: `lockstep.shm` and `harness.shm` are the same object.

The modules lie in the folder `harness`. Whichever name a process imports first names them; the other one
leads to them. So `import lockstep.shm` never takes the name `harness` away from a project that has a package
of that name, and `import harness` finds such a package even where ours comes first on the path. Standard
library only.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

OURS = Path(__file__).parents[1] / "harness"
_ITSELF = frozenset({"__main__", "names", "pytest_plugin"})
"""The modules that do lie in the folder `lockstep`."""
PACKAGE = "_package"
"""The name below `lockstep` of what `harness/__init__.py` defines."""
_FIRST_LINE = b'"""Lockstep: '


def package() -> str:
    """Return the name that the modules have in this process: "harness" or "lockstep"."""
    module = sys.modules.get("harness")
    return "harness" if module is not None and "__lockstep__" in vars(module) else "lockstep"


def loaded(module: str) -> Any:
    """Return the module of ours with this name below the package, None if it was not imported yet."""
    return sys.modules.get(f"{package()}.{module}")


def lazy_exports(importer: str, names: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of the package `importer`: names that are loaded on first use.

    So it can be imported without torch.

    Args:
        names: the names by the module, `harness.x`, that they are found in.
    """
    homes = {name: module for module, of_module in names.items() for name in of_module}
    top = importer.partition(".")[0]

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {importer.removesuffix(f'.{PACKAGE}')!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_renamed(homes[name], top)), name)

    return load


def share() -> None:
    """Decide who is `harness`; called by our package of that name while it is imported.

    It stays, unless the modules are named `lockstep` in this process, or somebody else's package would be
    found in its place if ours were not installed.
    """
    theirs = find_other(sys.path)
    if theirs is not None:
        module = sys.modules["harness"] = module_from_spec(theirs)
        assert theirs.loader is not None
        theirs.loader.exec_module(module)
    elif "lockstep" in sys.modules and sys.modules["lockstep"].__dict__.get("names_modules"):
        sys.modules["harness"] = OtherName("harness")
    else:
        sys.modules["harness"].__dict__["__lockstep__"] = True


def find_other(path: Sequence[str]) -> ModuleSpec | None:
    """Find, without importing it, a `harness` that is not ours; None if there is none.

    Args:
        path: directories to look in, `sys.path` or more. Finders of editable installs are asked too.
    """
    spec = PathFinder.find_spec("harness", [entry for entry in path if not _leads_to_ours(entry)])
    if spec is not None and (spec.origin is not None or _has_code(spec)):
        return spec
    for finder in sys.meta_path:
        if finder is not PathFinder and not isinstance(finder, OtherNames):
            with contextlib.suppress(Exception):  # whatever other people's finders raise
                spec = finder.find_spec("harness", None)
                if spec is not None and spec.loader is not None and not is_ours(spec.origin):
                    return spec
    return None


def _leads_to_ours(entry: str) -> bool:
    spec = PathFinder.find_spec("harness", [entry])
    return spec is not None and is_ours(spec.origin)


def _has_code(namespace: ModuleSpec) -> bool:
    """Whether a folder without `__init__.py` has modules that are no tests."""
    for folder in namespace.submodule_search_locations or ():
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                is_test = name.startswith(("test_", "conftest.")) or name.endswith("_test.py")
                if name.endswith(".py") and not is_test:
                    return True
    return False


@functools.cache
def is_ours(origin: str | None) -> bool:
    """Whether a file is the `__init__.py` of ours, of any copy."""
    try:
        with open(origin or "", "rb") as file:
            return file.read(len(_FIRST_LINE)) == _FIRST_LINE
    except OSError:
        return False


def _renamed(module: str, top: str) -> str:
    return top + module[module.index(".") :] if "." in module else top


class OtherName(ModuleType):
    """The package by the name that does not name its modules."""

    __path__: list[str] = []  # noqa: RUF012 (a module's own attribute: only `OtherNames` finds what is below)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["lockstep"], name)


class OtherNames(MetaPathFinder):
    """Finds the modules below `lockstep`, and below `harness` where that is the other name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, below = name.partition(".")
        if top == "harness" and below and isinstance(sys.modules.get("harness"), OtherName):
            return ModuleSpec(name, _LoaderOfOther(f"lockstep.{below}"))
        if top != "lockstep" or not below or below in _ITSELF:
            return None
        if package() == "lockstep":
            return _spec_of_file(name, below)
        return None if below == PACKAGE else ModuleSpec(name, _LoaderOfOther(f"harness.{below}"))


def come_first() -> None:
    """Put our finder before that of pytest, which would load `lockstep.x.y` of a wheel a second time."""
    sys.meta_path.sort(key=lambda finder: not isinstance(finder, OtherNames))


class _LoaderOfOther(Loader):
    """Puts a module that has the other name into the place of one that is being imported."""

    def __init__(self, module: str) -> None:
        self._module = module

    def exec_module(self, module: ModuleType) -> None:
        try:
            sys.modules[module.__name__] = importlib.import_module(self._module)
        except ModuleNotFoundError as error:
            if error.name == self._module:
                error.name, error.msg = module.__name__, f"No module named {module.__name__!r}"
            raise

    def get_code(self, name: str) -> CodeType | None:  # of `python -m`
        spec = find_spec(self._module)
        loader: Any = spec and spec.loader
        code: CodeType | None = loader.get_code(self._module)
        return code


def _spec_of_file(name: str, below: str) -> ModuleSpec | None:
    """Return the spec of a module named `lockstep.x`, found in the folder of ours.

    Raises:
        ImportError: its files were overwritten.
    """
    if not is_ours(str(OURS / "__init__.py")):
        raise ImportError(
            f"{OURS} has no longer the files of Lockstep: another distribution has installed its package "
            "`harness` in the same place. Install the two into different environments"
        )
    place = OURS if below == PACKAGE else OURS.joinpath(*below.split("."))
    is_package = below != PACKAGE and place.is_dir()
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not file.exists():
        return None
    sys.modules["lockstep"].__dict__["names_modules"] = True
    # A package has no path here: other finders would load what is below it in their own way.
    spec = ModuleSpec(name, _Renaming(name, str(file)), origin=str(file), is_package=is_package)
    spec.has_location = True
    return spec


class _Renaming(SourceFileLoader):
    """Loads a module of ours whose imports of `harness.x` are imports of `lockstep.x`."""

    def exec_module(self, module: ModuleType) -> None:
        # Where an import statement, in a function too, finds what to call (language reference, "builtins").
        module.__dict__["__builtins__"] = _BUILTINS
        super().exec_module(module)


def _import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    if level == 0 and (name == "harness" or name.startswith("harness.")):
        name = _renamed(name, "lockstep")
    return builtins.__import__(name, globals, locals, fromlist, level)


_BUILTINS = {**vars(builtins), "__import__": _import}
