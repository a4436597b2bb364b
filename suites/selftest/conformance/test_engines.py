"""Engines: found by name, by entry point or by place, and several of them in one run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.conformance import EngineError, find, known_names, plugin, registry
from lockstep.conformance.registry import built_in_names, check_name
from suites.selftest.project import PROJECTS, copy_project

PLUGIN = ("-p", "lockstep.conformance.plugin")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of engines on the path, also on that of new processes; its name.

    Not by pytester: that forgets all modules that a test imports, and torch cannot be imported twice.
    """
    shutil.copytree(PROJECTS / "engines" / "mine", tmp_path / "mine")
    for name, text in {"needs": "import not_installed", "breaks": "1 / 0"}.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    yield "mine.other"
    for name in [name for name in sys.modules if name.startswith("mine")]:
        del sys.modules[name]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """An installed package that offers an engine by an entry point."""
    points = EntryPoints([EntryPoint("theirs", f"{other}:Other", registry.ENTRY_POINTS)])
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))


@pytest.mark.parametrize("name", built_in_names())
def test_every_built_in_name_finds_an_engine_of_that_name(name: str) -> None:
    check_name(name)
    assert (find(name).name, repr(find(name))) == (name, name)


@pytest.mark.parametrize("place", ["Other", "INSTANCE", "Inner.Other"])
def test_an_engine_of_ones_own_is_named_by_its_place(other: str, place: str) -> None:
    check_name(f"{other}:{place}")
    assert find(f"{other}:{place}").name == "other"


@pytest.mark.usefixtures("installed")
def test_an_installed_engine_has_the_name_of_its_entry_point() -> None:
    check_name("theirs")
    assert find("theirs").name == "other"
    assert set(known_names()) == {"theirs", *built_in_names()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torch-fdsp1", "no engine is called 'torch-fdsp1'; known: lockstep, .*module:attribute"),
        (":Other", "no engine is called ':Other'"),
        ("nowhere.at_all:Engine", "there is no module 'nowhere' on the path. Install it"),
        ("mine.away:Engine", "there is no module 'mine.away' on the path"),
        ("mine.other.deep:Engine", "mine.other is a module and no package"),
    ],
)
def test_a_name_without_a_module_is_refused_before_any_import(other: str, name: str, message: str) -> None:
    with pytest.raises(EngineError, match=f"^--engine {name}: {message}"):
        check_name(name)
    assert other not in sys.modules


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "other:Nothing",
            r"mine\.other has no 'Nothing'; its .*: Lockstep, Other, INSTANCE, Half",
        ),
        ("other:Half", "it lacks capabilities, wrapper, .*grad_scaler of lockstep.conformance.Engine"),
        ("other:Wants", r"Wants\(\) cannot be called without arguments: TypeError: .*'size'"),
        ("away:Engine", "there is no module 'mine.away' on the path"),
        ("needs:Engine", "cannot be imported: ModuleNotFoundError: No module named 'not_installed'"),
        ("breaks:Engine", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.usefixtures("other")
def test_the_error_says_what_an_own_engine_lacks(place: str, message: str) -> None:
    with pytest.raises(EngineError, match=f"^--engine mine.{place}: .*{message}"):
        find(f"mine.{place}")


def test_names_are_checked_without_torch() -> None:
    code = "import sys; from lockstep.conformance.registry import check_name; check_name('torch-ddp')"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(("engine", "options"), [("lockstep", []), ("torch-ddp", ["--engine", "torch-ddp"])])
def test_a_claim_is_run_again_with_its_engine_unless_that_is_the_default(
    monkeypatch: pytest.MonkeyPatch, engine: str, options: list[str]
) -> None:
    item: Any = SimpleNamespace(path=Path("suites/core/test_core.py"))
    monkeypatch.setattr(plugin, "engine_of", lambda item: engine)
    monkeypatch.setattr(plugin, "claim_of", lambda item: "suites/core/test_core.py::test_a")
    assert plugin.pytest_ranks_rerun(item) == ["suites/core/test_core.py::test_a", *options]


@pytest.fixture
def result(pytester: pytest.Pytester, other: str) -> pytest.RunResult:
    copy_project("engines", pytester.path)
    engines = ("--engine", "lockstep", "--engine", f"{other}:Other", "--engine", "lockstep")
    return pytester.runpytest_subprocess(*PLUGIN, *engines, "-v", "-p", "no:cacheprovider", timeout=180)


def test_several_engines_run_each_test_on_the_same_worlds(
    pytester: pytest.Pytester, result: pytest.RunResult
) -> None:
    result.assert_outcomes(passed=7, failed=4)
    own = [f"{size}-{engine}" for size in ("1-rank", "2-ranks") for engine in ("lockstep", "*:Other")]
    result.stdout.fnmatch_lines_random([f"test_it.py::test_sizes[[]{name}[]] PASSED*" for name in own])
    result.stdout.fnmatch_lines(["*there are several engines: name `engine` among the test's arguments"])
    for rank in ("1-0", "2-0", "2-1"):
        ran = [line.split() for line in (pytester.path / f"ran-{rank}.txt").read_text().splitlines()]
        assert sorted(name for name, _ in ran) == ["lockstep", "other"]
        assert len({process for _, process in ran}) == 1
    # What runs one again names the one engine, as if there were no other.
    result.stdout.fnmatch_lines(
        [
            "pytest 'test_it.py::test_points[[]2[]]' -p lockstep.conformance.plugin -p no:cacheprovider "
            "--engine mine.other:Other --subtest b=3",
        ]
    )


def test_the_line_of_an_item_runs_it_again(pytester: pytest.Pytester, other: str) -> None:
    copy_project("engines", pytester.path)
    line = [
        *PLUGIN,
        "-W",
        "error",
        "test_it.py::test_points[2]",
        "--engine",
        f"{other}:Other",
        "--subtest",
        "b=3",
    ]
    result = pytester.runpytest_subprocess(*line, timeout=180)
    result.stdout.fnmatch_lines(["SUBFAILED[[]b=3[]] test_it.py::test_points[[]2[]] - *"])


def test_an_unknown_engine_is_refused_before_collection(pytester: pytest.Pytester) -> None:
    message = "^--engine zero: no engine is called 'zero'; known: lockstep, "
    with pytest.raises(pytest.UsageError, match=message):
        pytester.parseconfigure(*PLUGIN, "--engine", "lockstep", "--engine", "zero")


def test_a_run_ends_at_once_where_an_own_engine_cannot_be_loaded(
    pytester: pytest.Pytester, other: str
) -> None:
    copy_project("engines", pytester.path)
    result = pytester.runpytest_subprocess(*PLUGIN, "--engine", f"{other}:Away", timeout=180)
    result.assert_outcomes(errors=1)
    message = "--engine mine.other:Away: mine.other has no 'Away'; its classes *"
    result.stdout.fnmatch_lines(["rank 0 of 1 failed", message, f"!* {message}!*"])


@pytest.mark.parametrize("options", [(), (*PLUGIN, "--engine", "lockstep", "--engine", "torch-ddp")])
def test_a_fixture_engine_of_a_projects_own_is_left_alone(
    pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    copy_project("own_engine", pytester.path)
    result = pytester.runpytest_subprocess("-v", *options, timeout=180)
    result.assert_outcomes(passed=2)
    names = [f"test_it.py::test_an_engine_runs[[]{name}[]] PASSED*" for name in ("steam", "diesel")]
    result.stdout.fnmatch_lines(names)


def test_a_fixture_engine_of_a_projects_own_has_no_claims(pytester: pytest.Pytester) -> None:
    copy_project("own_engine", pytester.path)
    result = pytester.runpytest_subprocess(*PLUGIN, "--conformance", "out", timeout=180)
    result.stdout.fnmatch_lines(["no test of an engine was run"])


def test_without_the_plugin_there_is_no_option_engine(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--engine=lockstep", timeout=180)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*unrecognized arguments: --engine=lockstep"])
