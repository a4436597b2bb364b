"""The laws of the architecture, read off the source."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import lockstep
from lockstep.conformance.registry import built_in_names
from suites.selftest import times

ROOT = Path(lockstep.__file__).parent
PROJECT = Path(__file__).parents[2]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree: ast.AST, *, lazy: bool, types: bool = False) -> Iterator[str]:
    """Yield the modules that a tree imports: in functions too if `lazy`, for type checkers too if `types`."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.Lambda)
        if (is_typing_only(node) and not types) or (is_function and not lazy):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)
        else:
            yield from imports(node, lazy=lazy, types=types)


def package(name: str) -> str:
    return ".".join(name.split(".")[:2])


@pytest.mark.parametrize("room", ["lockstep.engine", "lockstep.shm"])
def test_some_rooms_import_nothing_else_of_harness(room: str) -> None:
    for name, tree in MODULES.items():
        if package(name) == room:
            ours = [found for found in imports(tree, lazy=True) if found.split(".")[0] == "lockstep"]
            assert [found for found in ours if package(found) != room] == []


def test_shared_memory_needs_torch_and_the_standard_library_alone() -> None:
    for name, tree in MODULES.items():
        if package(name) == "lockstep.shm":
            outside = {found.split(".")[0] for found in imports(tree, lazy=True)}
            assert outside <= {"lockstep", "torch", *sys.stdlib_module_names}, name


def test_nothing_imports_the_plugin_the_suites_or_the_benchmarks() -> None:
    for tree in MODULES.values():
        for found in imports(tree, lazy=True):
            assert found not in ("lockstep.plugin", "lockstep.conformance.plugin")
            assert found.split(".")[0] not in ("suites", "benchmarks")


def test_the_modules_import_each_other_without_a_cycle() -> None:
    graph = {
        name: {found for found in imports(tree, lazy=False) if found in MODULES and found != name}
        for name, tree in MODULES.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


def test_the_packages_import_each_other_without_a_cycle() -> None:
    """A module outside of a package counts as one; imports inside functions and for types count."""
    graph: dict[str, set[str]] = {}
    for name, tree in MODULES.items():
        found = {package(other) for other in imports(tree, lazy=True, types=True) if other in MODULES}
        graph.setdefault(package(name), set()).update(found - {package(name)})
    graphlib.TopologicalSorter(graph).prepare()


CONTROLLERS_SIDE = [
    "lockstep",
    "lockstep.plugin",
    "lockstep.controller.plugin",
    "lockstep.conformance.plugin",
    "lockstep.commands",
    "lockstep.port.module",
    "lockstep.doctor.command",
]


@pytest.mark.parametrize("name", CONTROLLERS_SIDE)
def test_the_controllers_side_can_be_imported_without_torch(name: str) -> None:
    code = f"import sys, {name}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_the_general_plugin_loads_little_and_nothing_of_engines() -> None:
    """Every pytest run of a user imports it, whether its tests are on ranks or not."""
    ours = "name.startswith('lockstep')"
    code = f"import sys, lockstep.plugin; print(*(name for name in sys.modules if {ours}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    lines = [Path(str(import_module(name).__file__)).read_text().splitlines() for name in names]
    assert sum(map(len, lines)) < 900
    assert {package(name) for name in names}.isdisjoint(
        {"lockstep.conformance", "lockstep.engine", "lockstep.shm"}
    )


def test_a_rank_starts_without_what_few_tests_use() -> None:
    """Every session waits for its imports: the recorders alone load DTensor, and sympy, for half a second."""
    code = "import sys, lockstep.rank; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {package(name) for name in done.stdout.split()}.isdisjoint(
        {
            "lockstep.assertions",
            "lockstep.conformance",
            "lockstep.engine",
            "lockstep.layouts",
            "lockstep.recorders",
            "lockstep.shm",
        }
    )


def test_assertions_load_no_dtensor_and_logs_no_compiler() -> None:
    """A test file that imports them is imported by the controller, too, before its first test runs."""
    code = (
        "import sys, torch, lockstep.assertions\n"
        "from lockstep.recorders import CollectivesLog\n"
        "from lockstep.recorders.execution import ExecutionLog\n"
        "with CollectivesLog(), ExecutionLog():\n"
        "    torch.ones(1).add(1)\n"
        "print('torch.distributed.tensor' in sys.modules, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# In the names of all functions of torch.distributed that move data between ranks.
COLLECTIVE_WORDS = ("reduce", "gather", "scatter", "all_to_all", "broadcast", "barrier", "send", "recv")


def test_inside_the_engine_only_collectives_calls_torch_distributed_collectives() -> None:
    for name, tree in MODULES.items():
        if package(name) == "lockstep.engine" and name != "lockstep.engine.collectives":
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner, called = ast.unparse(node.func.value), node.func.attr
                    moves_data = any(word in called for word in COLLECTIVE_WORDS) and not called[0].isupper()
                    assert not (owner in ("dist", "torch.distributed") and moves_data), (name, called)


def suite_files() -> list[Path]:
    rooms = [path for path in (PROJECT / "suites").iterdir() if path.name not in ("selftest", "engine")]
    return [path for room in rooms for path in [room, *room.rglob("*.py")] if path.suffix == ".py"]


def test_suites_reach_an_engine_through_the_fixture_only() -> None:
    assert suite_files()
    for path in suite_files():
        found = set(imports(ast.parse(path.read_text()), lazy=True))
        engines = ("lockstep.engine", "harness.engine", "torch.distributed.fsdp")
        assert not any(name.startswith(engines) for name in found), path


def test_suites_import_ours_by_the_name_that_is_always_free() -> None:
    """Installed beside a project's own package `harness` they find `lockstep` alone."""
    for path in suite_files():
        found = set(imports(ast.parse(path.read_text()), lazy=True))
        assert not any(name.split(".")[0] == "harness" for name in found), path


# A name in a suite, a module of its adapter, or the question which one it is.
NAMED_ENGINE = re.compile(
    rf"(?<![\w-])({'|'.join(name.replace('-', '[-_]') for name in built_in_names())}|engine\.name)(?![\w-])"
)


def test_no_suite_names_an_engine() -> None:
    named = {
        f"{path.relative_to(PROJECT)}:{number}": found[0]
        for path in suite_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := NAMED_ENGINE.search(re.sub(r"\bfrom lockstep\b", "", line)))
    }
    assert named == {}


COMPOSABLE_ROOMS = ("replicate", "two_d")
"""Suites of a front that shards in place, whose parameters an optimizer of the user's takes as they are."""


def test_suites_make_optimizers_by_the_engine_only() -> None:
    """An engine may have its own: suites hand torch's classes to it, and to references, and call none."""
    called = {
        f"{path.relative_to(PROJECT)}:{number}"
        for path in suite_files()
        if path.parent.name not in COMPOSABLE_ROOMS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\boptim\.[A-Z]\w*\(\w*[^)]*parameters\(\)", line)
    }
    assert called == set()


# In what stands before `.backward()` where a claim runs that of a model that is not sharded.
UNSHARDED = re.compile(r"(?<![a-z])(bare|reference|computed)(?![a-z])")


def test_suites_go_backward_by_the_engine_only() -> None:
    """An engine may reduce gradients in a `backward` of its own: `loss.backward()` is for references."""
    called = {
        f"{path.relative_to(PROJECT)}:{node.lineno}"
        for path in suite_files()
        if path.parent.name not in COMPOSABLE_ROOMS
        and path != PROJECT / "suites" / "conftest.py"  # of a composable front
        for node in ast.walk(ast.parse(path.read_text()))
        # With arguments it is the method of an engine, or of something that trains.
        if isinstance(node, ast.Call) and not node.args and isinstance(node.func, ast.Attribute)
        if node.func.attr == "backward" and ast.unparse(node.func.value) != "self"
        if not UNSHARDED.search(ast.unparse(node.func.value))
    }
    assert called == set()


def test_public_names_are_what_the_package_says() -> None:
    assert sorted(lockstep.__all__) == lockstep.__all__
    for name in lockstep.__all__:
        assert getattr(lockstep, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lockstep.nothing  # noqa: B018


@pytest.mark.parametrize("name", ["engine", "recorders", "assertions", "layouts", "shm"])
def test_packages_name_what_is_public(name: str) -> None:
    room = __import__(f"lockstep.{name}", fromlist=["__all__"])
    assert all(hasattr(room, public) for public in room.__all__)
    shown = {
        alias.asname or alias.name
        for node in ast.iter_child_nodes(MODULES[f"lockstep.{name}"])
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert shown >= set(room.__all__)


def test_no_room_is_named_after_nothing() -> None:
    assert {"utils", "helpers", "common", "misc"}.isdisjoint(name.split(".")[-1] for name in MODULES)


SELFTESTS = PROJECT / "suites" / "selftest"
OF_NO_ROOM = {"bad_input", "projects"}
"""Folders that hold no tests: what the tests beside them draw and run."""


def rooms() -> set[str]:
    """Return the rooms and features of harness, as paths below it."""
    found = [*ROOT.glob("*/__init__.py"), *ROOT.glob("features/*/__init__.py")]
    return {str(path.parent.relative_to(ROOT)) for path in found} - {"features"}


def test_each_room_and_feature_has_a_folder_of_self_tests() -> None:
    """But the engine, with unit tests in suites/engine."""
    folders = {path.name for path in SELFTESTS.iterdir() if path.is_dir()} - OF_NO_ROOM - {"__pycache__"}
    tested = {path.parent.name for path in SELFTESTS.glob("*/test_*.py")}
    assert folders == tested == {Path(room).name for room in rooms() - {"engine"}}


def test_contributing_says_what_to_run_for_each_room_and_feature() -> None:
    rows = {row["room"]: row["tests"] for row in times.ROW.finditer(times.PAGE.read_text())}
    folders = {room: f"suites/selftest/{Path(room).name}" for room in rooms()}
    assert rows == folders | {"engine": "suites/engine"}
