"""The core knows no feature and no accelerator."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from suites.selftest.test_laws import MODULES, ROOT, imports

CORE = ("backends", "controller", "launch", "rank", "reporting", "world")
"""Folders of the core; the files beside them are of the core as well."""
FEATURES = sorted(each.parent.name for each in ROOT.glob("features/*/plugin.py"))


def modules_of_core() -> Iterator[tuple[str, ast.Module]]:
    """Yield the core's modules; not the package itself, whose public names features define."""
    packages = {name.split(".")[1] for name in MODULES if name.count(".") > 1}
    for name, tree in MODULES.items():
        room = name.partition(".")[2].partition(".")[0]
        if room and room != "features" and (room in CORE or room not in packages):
            yield name, tree


def test_the_core_imports_no_feature() -> None:
    """Lazily or for types neither; `lockstep.features` itself only lists the folders that there are."""
    imported = {
        (name, each)
        for name, tree in modules_of_core()
        for each in imports(tree, lazy=True, types=True)
        if each.startswith(tuple(f"lockstep.features.{feature}" for feature in FEATURES))
    }
    assert not imported


def test_the_core_names_no_module_of_a_feature_in_a_string() -> None:
    naming = {
        (name, node.value)
        for name, tree in modules_of_core()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(rf"\bfeatures[./]({'|'.join(FEATURES)})\b", node.value)
    }
    assert not naming


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
