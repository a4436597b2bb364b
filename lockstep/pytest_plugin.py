"""The pytest entry point: loads the plugin, unless `harness` is a package of somebody else.

Every pytest run loads it where Lockstep is installed, whatever the project. Imports pytest alone.

PYTEST_DONT_REWRITE: it has no asserts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from lockstep import names

PLUGIN = "harness.plugin"
"""The name that the plugin is registered by, whatever its module is called."""
RANK_PLUGIN = "harness-rank"
_HEADER = pytest.StashKey[str]()
MOST_FOLDERS = 5000
"""How many folders are looked into: those of tests, which pytest is about to collect."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Load the plugin under the name that is free; where it must be asked for and was not, note why not."""
    if pluginmanager.hasplugin(PLUGIN) or pluginmanager.is_blocked(PLUGIN):
        return
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    rank = pluginmanager.get_plugin(RANK_PLUGIN)
    if rank is not None:  # its controller has decided
        package = type(rank).__module__.partition(".")[0]
    elif config is None or (other := find_other(config)) is None:
        package = "harness"
    elif _is_asked_for(config):
        package = "lockstep"
    else:
        config.stash[_HEADER] = (
            f"lockstep: not loaded, as `harness` is another package here ({other}); to use it all the same: "
            "addopts = -p lockstep, and import it as `lockstep`"
        )
        return
    pluginmanager.register(importlib.import_module(f"{package}.plugin"), PLUGIN)


def pytest_report_header(config: pytest.Config) -> str | None:
    return config.stash.get(_HEADER, None)


def _is_asked_for(config: pytest.Config) -> bool:
    """Whether the command line, addopts or PYTEST_PLUGINS names us."""
    # Workers of pytest-xdist have in `option` what the command line was.
    named = {*config.known_args_namespace.plugins, *(getattr(config.option, "plugins", None) or ())}
    named.update(os.environ.get("PYTEST_PLUGINS", "").split(","))
    return any(name == "lockstep" or name.startswith("lockstep.") for name in named)


def find_other(config: pytest.Config) -> str | None:
    """Return the place of a `harness` that tests of this project may import and that is not ours."""
    root, options = config.rootpath, config.known_args_namespace
    path = [
        *map(str, config.getini("pythonpath")),
        str(config.invocation_params.dir),
        str(root),
        f"{root}/src",
    ]
    if getattr(options, "importmode", "prepend") != "importlib":  # else pytest adds no folder to the path
        places = [str(arg).split("::")[0] for arg in options.file_or_dir]
        base = config.invocation_params.dir if places else root
        places = places or config.getini("testpaths") or [str(config.invocation_params.dir)]
        skipped = config.getini("norecursedirs")
        for place in places:
            path += _folders_of_tests(base / place, root, skipped)
    spec = names.find_other([*path, *sys.path])
    if spec is None:
        return None
    return spec.origin or ", ".join(dict.fromkeys(spec.submodule_search_locations or ()))


def _folders_of_tests(place: Path, root: Path, skipped: Sequence[str]) -> Iterator[str]:
    """Yield the folders with a `harness` that pytest may put on the path, for tests and conftests."""
    start = place if place.is_dir() else place.parent
    for folder in start.parents:
        if folder.is_relative_to(root) and not (folder / "__init__.py").exists():
            yield str(folder)
    for number, (above, below, files) in enumerate(os.walk(start)):
        if "__init__.py" not in files and ("harness.py" in files or "harness" in below):
            yield above
        if start is not place or number > MOST_FOLDERS:
            return
        if "pyvenv.cfg" in files:
            below.clear()
        below[:] = [name for name in below if not any(fnmatch(name, pattern) for pattern in skipped)]
