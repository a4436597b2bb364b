"""Engines: found by name, by entry point or by place, and several of them in one run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from harness.conformance import EngineError, find, known_names, registry
from harness.conformance.registry import built_in_names, check_name

OTHER = """
from harness.conformance.adapters.lockstep import Lockstep

class Other(Lockstep):
    name = "other"

INSTANCE = Other()

class Half:
    name = "half"
    def shard(self, model, spec): ...
    @property
    def composable(self): raise NotImplementedError("told too early")

class Wants:
    def __init__(self, size): ...

class Inner:
    Other = Other
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of engines on the path, also of new processes; its name.

    Not made by pytester: that forgets all modules that a test imports, and torch cannot be imported twice.
    """
    package = tmp_path / "mine"
    package.mkdir()
    files = {"__init__": "", "other": OTHER, "needs": "import not_installed", "breaks": "1 / 0"}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
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
def test_an_installed_engine_is_known_by_the_name_of_its_entry_point() -> None:
    check_name("theirs")
    assert find("theirs").name == "other"
    assert set(known_names()) == {"theirs", *built_in_names()}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("torch-fdsp1", "no engine is called 'torch-fdsp1'; known: lockstep, .*module:attribute"),
        (":Other", "no engine is called ':Other'"),
        ("nowhere.at_all:Engine", "there is no module 'nowhere' on the path. Install it"),
        ("mine.away:Engine", "there is no module 'mine.away' on the path"),
        ("mine.other.deep:Engine", "mine.other is a module and no package"),
    ],
)
def test_a_name_behind_which_there_is_no_module_is_refused_before_anything_is_imported(
    other: str, name: str, told: str
) -> None:
    with pytest.raises(EngineError, match=f"^--engine {name}: {told}"):
        check_name(name)
    assert other not in sys.modules


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            "other:Nothing",
            r"mine\.other has no 'Nothing'; its .*: Lockstep, Other, INSTANCE, Half",
        ),
        ("other:Half", "it lacks capabilities, unwrapped, .*grad_scaler of harness.conformance.Engine"),
        ("other:Wants", r"Wants\(\) cannot be called without arguments: TypeError: .*'size'"),
        ("away:Engine", "there is no module 'mine.away' on the path"),
        ("needs:Engine", "cannot be imported: ModuleNotFoundError: No module named 'not_installed'"),
        ("breaks:Engine", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
@pytest.mark.usefixtures("other")
def test_what_an_engine_of_ones_own_lacks_is_told(place: str, told: str) -> None:
    with pytest.raises(EngineError, match=f"^--engine mine.{place}: .*{told}"):
        find(f"mine.{place}")


def test_names_are_checked_without_torch() -> None:
    code = "import sys; from harness.conformance.registry import check_name; check_name('torch-ddp')"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


PLUGIN = ("-p", "harness.conformance.plugin")

SUITE = """
import os
import pytest

@pytest.fixture
def model(engine): return engine.name

@pytest.mark.ranks(1, 2)
def test_sizes(world, model):
    with open(f"ran-{world.size}-{world.rank}.txt", "a") as file:
        print(model, os.getpid(), file=file)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("a", [1, 2])
def test_points(world, run_subtests, engine, a):
    def claim(b):
        assert (a, b, engine.name) != (2, 3, "other")
    run_subtests({"b": [3, 4]}, claim)

@pytest.mark.ranks(2)
def test_by_name(world, request): request.getfixturevalue("engine")

def test_of_no_engine(): assert 0
"""


@pytest.fixture
def result(pytester: pytest.Pytester, other: str) -> pytest.RunResult:
    # New ranks follow each failure.
    pytester.makeini("[pytest]\nranks_preload = harness.conformance.adapters.lockstep")
    pytester.makepyfile(test_it=SUITE)
    engines = ("--engine", "lockstep", "--engine", f"{other}:Other", "--engine", "lockstep")
    return pytester.runpytest_subprocess(*PLUGIN, *engines, "-v", "-p", "no:cacheprovider", timeout=60)


def test_each_test_of_an_engine_runs_on_each_of_several_on_the_same_worlds(
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
            "pytest 'test_it.py::test_points[[]2[]]' -p harness.conformance.plugin -p no:cacheprovider "
            "--engine mine.other:Other --subtest b=3",
        ]
    )


def test_the_line_of_an_item_runs_it_again(pytester: pytest.Pytester, other: str) -> None:
    pytester.makepyfile(test_it=SUITE)
    line = [*PLUGIN, "test_it.py::test_points[2]", "--engine", f"{other}:Other", "--subtest", "b=3"]
    result = pytester.runpytest_subprocess(*line, timeout=60)
    result.stdout.fnmatch_lines(["SUBFAILED[[]b=3[]] test_it.py::test_points[[]2[]] - *"])


def test_an_unknown_engine_is_refused_before_collection(pytester: pytest.Pytester) -> None:
    told = "^--engine zero: no engine is called 'zero'; known: lockstep, "
    with pytest.raises(pytest.UsageError, match=told):
        pytester.parseconfigure(*PLUGIN, "--engine", "lockstep", "--engine", "zero")


def test_a_run_ends_at_once_where_an_engine_of_ones_own_cannot_be_had(
    pytester: pytest.Pytester, other: str
) -> None:
    pytester.makepyfile(test_it=SUITE)
    result = pytester.runpytest_subprocess(*PLUGIN, "--engine", f"{other}:Away", timeout=60)
    result.assert_outcomes(errors=1)
    told = "--engine mine.other:Away: mine.other has no 'Away'; its classes *"
    result.stdout.fnmatch_lines(["rank 0 of 1 failed", told, f"!* {told}!*"])
