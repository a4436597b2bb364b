"""Private names of torch, pytest, Hypothesis and multiprocessing: each is where the harness expects it.

They are read off the modules `*_internals.py`, so a new one is checked as soon as it is used. With a new
release run this file first: each failure is a sentence that names our module and says what to look for.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lockstep

ROOT = Path(lockstep.__file__).resolve().parent
OTHERS = ("torch", "pytest", "_pytest", "hypothesis", "multiprocessing")
MODULES = sorted(ROOT.rglob("*_internals.py"))
OUTCOMES = {"harness/exceptions.py", "harness/conformance/capabilities.py"}
"""Modules that take a class of `_pytest.outcomes`: what pytest exports of it cannot be typed."""
MODELS = {"harness/conformance/models/nested.py"}
"""Models import torch alone; one delays a GPU by `torch.cuda._sleep`."""


@dataclass(frozen=True)
class Use:
    """A private name in the source of ours."""

    file: str
    line: int
    name: str
    """With its module: `torch._C._set_cudnn_benchmark`."""
    hint: str
    """The docstring of what uses it."""


def is_private(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in OTHERS and (
        parts[0] == "_pytest"
        or any(part.startswith("_") and not part.startswith("__") for part in parts)
        or name.startswith("hypothesis.internal")
    )


def uses(path: Path) -> Iterator[Use]:
    """Yield the private names that a module imports, or reads as attributes of what it has imported.

    Those of modules that may not be imported, too, which are read by `loaded("torch._module", "name")`.
    """
    tree = ast.parse(path.read_text())
    file, aliases = str(path.relative_to(ROOT.parent)), dict(_aliases(tree))

    def visit(node: ast.AST, hint: str, inner: bool = False) -> Iterator[Use]:
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            hint = ast.get_docstring(node) or hint
        name = ""
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(full := f"{node.module}.{alias.name}"):
                    yield Use(file, node.lineno, full, hint)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "loaded":
            yield Use(file, node.lineno, ".".join(map(ast.literal_eval, node.args)), hint)
        elif isinstance(node, ast.Attribute) and not inner:
            root, _, rest = ast.unparse(node).partition(".")
            if rest.replace(".", "").isidentifier() and root in aliases and isinstance(node.ctx, ast.Load):
                name = f"{aliases[root]}.{rest}"
                if is_private(name):
                    yield Use(file, node.lineno, name, hint)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, hint, bool(name))

    yield from visit(tree, "")


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def find(name: str) -> Any:
    """Return what a dotted name stands for: of the longest module that can be imported, its attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


USES = {
    (use.file, use.name): use for path in [*MODULES, *map(ROOT.parent.joinpath, MODELS)] for use in uses(path)
}


@pytest.mark.parametrize("use", USES.values(), ids=lambda use: f"{use.file}-{use.name}")
def test_a_private_name_is_where_it_is_expected(use: Use) -> None:
    try:
        find(use.name)
    except (AttributeError, ImportError) as error:
        package = importlib.import_module(use.name.split(".")[0].lstrip("_"))
        version = getattr(package, "__version__", "of this Python")
        pytest.fail(
            f"{package.__name__} {version} has no {use.name} ({error}), which {use.file}:{use.line} uses. "
            f"What to look for: {use.hint}",
            pytrace=False,
        )


def test_a_name_that_moves_fails_with_a_sentence() -> None:
    use = Use("harness/rank/torch_internals.py", 7, "torch._C._moved_away", "If it moves: look there.")
    with pytest.raises(pytest.fail.Exception, match=r"has no torch\._C\._moved_away .* look there"):
        test_a_private_name_is_where_it_is_expected(use)


def test_there_are_names_of_each_package() -> None:
    packages = {name.split(".")[0] for _, name in USES}
    assert packages == {"torch", "_pytest", "hypothesis", "multiprocessing"}
    assert len(USES) > 60


def test_private_names_are_used_in_modules_for_them_alone() -> None:
    found = {
        f"{use.file}:{use.line}": use.name
        for path in ROOT.rglob("*.py")
        if path not in MODULES
        for use in uses(path)
        if use.file not in OUTCOMES | MODELS
    }
    assert found == {}


@pytest.mark.parametrize("file", sorted(OUTCOMES))
def test_classes_of_outcomes_are_those_that_pytest_exports(file: str) -> None:
    found = {find(use.name) for use in uses(ROOT.parent / file)}
    assert found
    assert found <= {pytest.fail.Exception, pytest.skip.Exception}
