"""The pytest entry point: loads the plugin, unless `harness` is a package of somebody else.

Every pytest run loads it where Lockstep is installed, whatever the project. Imports pytest alone.

PYTEST_DONT_REWRITE: it has no asserts.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from glob import glob
from pathlib import Path

import pytest

from lockstep import names

PLUGIN = "harness.plugin"
"""The name that the plugin is registered by, whatever its module is called."""
RANK_PLUGIN = "harness-rank"
_HEADER = pytest.StashKey[str]()
MOST_FOLDERS = 5000
"""How many folders below a place of tests are looked into; pytest is about to collect them."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin under the name that is free; where it must be asked for and was not, note why not."""
    names.come_first()
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    named = _named_plugins(config)
    if pluginmanager.hasplugin(PLUGIN) or pluginmanager.is_blocked(PLUGIN):
        return
    rank = pluginmanager.get_plugin(RANK_PLUGIN)
    if rank is not None:  # its controller has decided
        package = type(rank).__module__.partition(".")[0]
    elif config is None or (other := find_other(config, parser)) is None:
        package = "harness"
    elif any(name.split(".")[0] == "lockstep" for name in named):
        package = "lockstep"
    else:
        config.stash[_HEADER] = (
            f"lockstep: not loaded, as `harness` is another package here ({other}); to use it all the same: "
            "addopts = -p lockstep, and import it as `lockstep`"
        )
        return
    pluginmanager.register(importlib.import_module(f"{package}.plugin"), PLUGIN)
    if config is not None and _runs_suites(config):
        engines = importlib.import_module(f"{package}.conformance.plugin")
        if not pluginmanager.is_registered(engines):  # `-p` may have named it by either name
            pluginmanager.register(engines, f"{package}.conformance.plugin")


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(_HEADER, None)


def why_not_loaded(config: pytest.Config) -> str:
    """Return the sentence about a plugin that another package `harness`, or `-p no:`, keeps out."""
    return config.stash.get(_HEADER, "lockstep: not loaded, as an option `-p no:` says")


def _named_plugins(config: pytest.Config | None) -> list[str]:
    """Return what PYTEST_PLUGINS and `-p`, in addopts and on the command line, name, in this order."""
    named = os.environ.get("PYTEST_PLUGINS", "").split(",")
    if config is not None:  # workers of pytest-xdist have in `option` what the command line was
        named += [*(getattr(config.option, "plugins", None) or ()), *config.known_args_namespace.plugins]
    return named


def _runs_suites(config: pytest.Config) -> bool:
    """Return whether an argument names our suites, as in `pytest --pyargs lockstep_suites.core`."""
    options = config.known_args_namespace
    return options.pyargs and any(arg.split(".")[0] == "lockstep_suites" for arg in options.file_or_dir)


def find_other(config: pytest.Config, parser: pytest.Parser) -> str | None:
    """Return the place of a `harness` that tests of this project may import and that is not ours."""
    root, started_in = config.rootpath, config.invocation_params.dir
    path = [*map(str, config.getini("pythonpath")), str(started_in), str(root), f"{root}/src"]
    if getattr(config.known_args_namespace, "importmode", "prepend") != "importlib":  # adds no folder
        for place in _places_of_tests(config, parser):
            path += _folders_of_tests(place, config)
    spec = names.find_other([*path, *sys.path])
    if spec is None:
        return None
    return spec.origin or ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))


def _places_of_tests(config: pytest.Config, parser: pytest.Parser) -> list[Path]:
    """Return the files and folders that pytest will collect, or more.

    Values of options that other plugins are about to add are positional arguments for now.
    """
    root, started_in = config.rootpath, config.invocation_params.dir
    named = (started_in / str(arg).split("::")[0] for arg in config.known_args_namespace.file_or_dir)
    places = [place for place in named if place.exists()]
    args = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    args += [*config.getini("addopts"), *map(str, config.invocation_params.args)]
    if places and not parser.parse_known_and_unknown_args(args)[1]:
        return places
    patterns = config.getini("testpaths") if started_in == root else []
    found = [root / name for pattern in patterns for name in glob(pattern, root_dir=root, recursive=True)]
    return [*places, *(found or [started_in])]


def _folders_of_tests(place: Path, config: pytest.Config) -> Iterator[str]:
    """Yield the folders with a `harness` that pytest puts on the path, for tests and conftests."""
    start = place if place.is_dir() else place.parent
    for folder in start.parents:
        if folder.is_relative_to(config.rootpath) and not (folder / "__init__.py").exists():
            yield str(folder)
    if start is not place:
        yield str(start)
        return
    skipped = config.getini("norecursedirs")
    for number, (above, below, files) in enumerate(os.walk(start)):
        if number == MOST_FOLDERS:
            return
        is_top = "__init__.py" not in files and ("harness.py" in files or "harness" in below)
        if is_top and _has_tests(above, config):
            yield above
        if "pyvenv.cfg" in files:
            below.clear()
        below[:] = [name for name in below if not _matches(above, name, skipped)]


def _has_tests(folder: str, config: pytest.Config) -> bool:
    """Whether a folder, or a package in it, has files that pytest imports."""
    imported = ["conftest.py", *config.getini("python_files")]
    if config.known_args_namespace.doctestmodules:
        imported.append("*")
    for above, below, files in os.walk(folder):
        if above != folder and "__init__.py" not in files:
            below.clear()
        elif any(name.endswith(".py") and _matches(above, name, imported) for name in files):
            return True
    return False


def _matches(folder: str, name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, or for patterns with a slash the path, matches one, by the rules of pytest."""
    return any(
        fnmatch(f"{folder}/{name}", f"*/{pattern}") if "/" in pattern else fnmatch(name, pattern)
        for pattern in patterns
    )
