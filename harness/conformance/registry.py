"""Engines by their names, and those that a run and an item are about. Used on both sides.

Neither torch nor an engine is imported before `find` is called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockstep.conformance.interface import Engine

_HOMES = {
    "lockstep": "lockstep.conformance.adapters.lockstep:Lockstep",
    "lockstep-composable": "lockstep.conformance.adapters.lockstep:LockstepComposable",
    "torch-fsdp2": "lockstep.conformance.adapters.torch_fsdp2:TorchFsdp2",
    "torch-fsdp1": "lockstep.conformance.adapters.torch_fsdp1:TorchFsdp1",
    "torch-ddp": "lockstep.conformance.adapters.torch_ddp:TorchDdp",
    "torch-zero1": "lockstep.conformance.adapters.torch_zero1:TorchZero1",
}

ENTRY_POINTS = "lockstep.engines"
"""The group of entry points under which an installed package offers engines of its own."""

DEFAULT = "lockstep"
FIXTURE = "engine_name"
"""The fixture through which the plugin's fixture `engine` gets its name.

A fixture `engine` of a project's own that does not use it has nothing to do with the engines of a run.
"""


INSTALLED_SUITES = Path(__file__).parents[2] / "lockstep_suites"
"""The folder of the suites where they are installed; in a checkout a link to `suites`."""


def suites_are_installed() -> bool:
    """Return whether the suites came with a wheel, in place of a checkout."""
    return INSTALLED_SUITES.is_dir() and not INSTALLED_SUITES.is_symlink()


class EngineError(ValueError):
    """No usable engine has the name; the message names what is missing."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"--engine {name}: {what}")


def built_in_names() -> tuple[str, ...]:
    """Return the names of the engines that come with Lockstep, its own first."""
    return tuple(_HOMES)


def built_in_modules(names: Iterable[str]) -> list[str]:
    """Return the modules of those of the engines that are built in."""
    return [_HOMES[name].partition(":")[0] for name in names if name in _HOMES]


def known_names() -> tuple[str, ...]:
    """Return the names that `find` knows, built-in or installed, in alphabetical order."""
    return tuple(sorted({*_HOMES, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def check_name(name: str) -> None:
    """Raise EngineError unless `name` is known, or is module:attribute and there is such a module.

    Nothing is imported: what the module holds shows when a rank calls `find`.
    """
    _check_module(name, _home_of(name)[0])


def find(name: str) -> Engine:
    """Return the engine called `name`, or the class or instance at `module:attribute`.

    Raises:
        EngineError: there is none, or it cannot be made, or lacks a member of `Engine`.
    """
    module, attribute = _home_of(name)
    found = _load(name, module, attribute)
    if isinstance(found, type):
        found = _made(name, found)
    _check_interface(name, found)
    engine: Engine = found
    return engine


def _home_of(name: str) -> tuple[str, str]:
    home = _HOMES.get(name) or next(
        (point.value for point in entry_points(group=ENTRY_POINTS, name=name)), name
    )
    module, _, attribute = (part.strip() for part in home.partition(":"))
    if not (module and attribute):
        raise EngineError(
            name,
            f"no engine is called {name!r}; known: {', '.join(known_names())}. One of your own is named "
            "module:attribute, as in my_package.my_module:MyEngine",
        )
    return module, attribute


def _check_module(name: str, module: str) -> None:
    path: Any = None
    parts = module.split(".")
    for number in range(1, len(parts) + 1):
        part = ".".join(parts[:number])
        # As importlib.util.find_spec does, but that imports the packages above, which may import torch.
        specs = (finder.find_spec(part, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, specs), None)
        if part in sys.modules:
            path = getattr(sys.modules[part], "__path__", None)
        elif spec is None:
            raise EngineError(name, _no_module(part))
        else:
            path = spec.submodule_search_locations
        if path is None and part != module:
            raise EngineError(name, f"{part} is a module and no package, so there is no {module}")


def _no_module(module: str) -> str:
    return (
        f"there is no module {module!r} on the path. Install it, name its directory in PYTHONPATH or in the "
        "ini option `pythonpath`, or start in that directory"
    )


def _load(name: str, module: str, attribute: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise EngineError(name, _no_module(error.name)) from None
        raise EngineError(name, f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            has = [
                word
                for word, value in vars(found).items()
                if isinstance(value, type) or inspect.getattr_static(value, "shard", None) is not None
            ]
            raise EngineError(
                name, f"{module} has no {attribute!r}; its classes and engines: {', '.join(has) or 'none'}"
            )
        found = getattr(found, part)
    return found


def _made(name: str, cls: type) -> Any:
    try:
        return cls()
    except Exception as error:
        what = f"{cls.__name__}() cannot be called without arguments: {type(error).__name__}: {error}"
        raise EngineError(name, f"{what}. Name an instance instead, or a class that needs none") from error


def _check_interface(name: str, found: object) -> None:
    from lockstep.conformance.interface import Engine

    members = [member for member in vars(Engine) if not member.startswith("_")]
    # Statically: a property may refuse what the engine does not offer.
    missing = [member for member in members if inspect.getattr_static(found, member, None) is None]
    if missing:
        raise EngineError(
            name,
            f"it lacks {', '.join(missing)} of lockstep.conformance.Engine; see docs/how_to/your_engine.md",
        )


# The engines of a run


def engines_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the engines under test as `--engine` names them, each once, in the order they were given."""
    return tuple(dict.fromkeys(config.getoption("engine") or [DEFAULT]))


def engine_of(item: pytest.Item) -> str | None:
    """Return the name of the engine that the item runs on; None if it does not ask for one."""
    if FIXTURE not in getattr(item, "fixturenames", ()):
        return None
    engines = engines_of(item.config)
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get(FIXTURE) if callspec is not None and len(engines) > 1 else engines[0]
    return name if name in engines else None


def claim_of(item: pytest.Item) -> str:
    """Return the item's node id without the engine: its id in a run of one engine.

    Node ids of the installed suites depend on the run's rootdir: there it is that of a checkout.
    """
    nodeid, engine = str(item.nodeid), engine_of(item)
    if str(item.path).startswith(f"{INSTALLED_SUITES}/"):
        file = item.path.relative_to(INSTALLED_SUITES).as_posix()
        nodeid = f"suites/{file}::{nodeid.partition('::')[2]}"
    if engine is None or len(engines_of(item.config)) == 1:
        return nodeid
    if nodeid.endswith(f"[{engine}]"):
        return nodeid.removesuffix(f"[{engine}]")
    return f"{nodeid.removesuffix(f'-{engine}]')}]"
