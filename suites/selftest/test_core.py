"""The core knows no feature and no accelerator: what it still imports of features may only get shorter."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from suites.selftest.test_laws import MODULES, imports

CORE = ("backends", "controller", "launch", "rank", "reporting", "world")
"""Folders of the core; the files beside them are of the core as well."""
FEATURES = (
    "features",
    "hosts",
)
"""Folder of the features, and modules that are still to move there."""

STILL_IMPORTED = {
    "controller.plugin": "hosts.launchers hosts.remote",
    "controller.requests": "hosts.placement",
    "controller.rerun": "hosts.roster",
}
"""Features that a module of the core still imports: nothing may be added, and what is not used must go."""


def feature_of(name: str) -> str | None:
    below = name.removeprefix("lockstep.")
    return next((each for each in FEATURES if below == each or below.startswith(f"{each}.")), None)


def modules_of_core() -> Iterator[tuple[str, ast.Module]]:
    """Yield the core's modules; not the package itself, whose public names features define."""
    packages = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    for name, tree in MODULES.items():
        room = name.partition(".")[2].partition(".")[0]
        if room and feature_of(name) is None and (room in CORE or room not in packages):
            yield name, tree


def test_the_core_imports_no_feature_but_those_that_are_listed() -> None:
    found: dict[str, str] = {}
    for name, tree in modules_of_core():
        features = {each for each in imports(tree, lazy=True, types=True) if feature_of(each)}
        features.discard("lockstep.features")  # it registers the folders that there are
        if features:
            modules = (each if each in MODULES else each.rpartition(".")[0] for each in features)
            short = sorted({each.removeprefix("lockstep.") for each in modules})
            found[name.removeprefix("lockstep.")] = " ".join(short)
    assert found == STILL_IMPORTED


def test_the_core_names_no_type_of_device_but_the_cpu() -> None:
    """Whatever is of one accelerator alone stands in `lockstep.backends`."""
    naming = {
        name.removeprefix("lockstep.")
        for name, tree in modules_of_core()
        if not name.startswith("lockstep.backends.")
        for node in ast.walk(tree)
        if ast.unparse(node) in ("'cuda'", "torch.cuda")
    }
    assert not naming
