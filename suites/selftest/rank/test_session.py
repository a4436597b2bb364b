"""Features of pytest on ranks: fixtures, hooks, skips, warnings, properties."""

from __future__ import annotations

import re

import pytest

from suites.selftest.project import Run

PROJECT = "session"
OPTIONS = (
    *("alone", "one", "two", "ordinary", "tear_downs", "scopes"),
    *("--doctest-modules", "--ignore-glob=*/conftest.py"),  # several modules of one name
)
ENVIRON = {"LOCKSTEP_LEASES": "/nowhere/to/be/found"}


def notes(run: Run, name: str) -> list[str]:
    return (run.path / f"{name}.txt").read_text().splitlines()


# Fixtures


@pytest.mark.parametrize("rank", [0, 1])
def test_fixtures_of_all_scopes_live_once_a_rank(run: Run, rank: int) -> None:
    files = (run.path / "scopes" / "pkg").glob("test_*.py")
    names = [name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())]
    assert len(names) == 7
    assert {run.outcome(name) for name in names} == {"passed"}
    assert notes(run, f"rank-{rank}-of-2") == [
        *("session up", "package up", "pkg.test_first up", "a", "class up", "b", "c", "class down"),
        *("pkg.test_first down", "pkg.test_second up", "d", "pkg.test_second down"),
        *("package down", "session down"),
    ]


def test_fixtures_of_other_worlds_live_on_their_own(run: Run) -> None:
    first, last = ["session up", "package up", "pkg.test_first up"], ["pkg.test_first down", "package down"]
    assert notes(run, "rank-0-of-1") == [*first, "other", *last, "session down"]
    assert notes(run, "controller") == ["up", "down"]


def test_failed_tear_downs_of_ranks_and_controller_are_reported(run: Run) -> None:
    errors = [line for line in run.output.splitlines() if line.startswith("ERROR ")]
    assert errors == [
        "ERROR tear_downs/test_it.py::test_narrow - rank 0: KeyError: 'narrow'",
        "ERROR tear_downs/test_it.py::test_narrow - ValueError: wide",
    ]


@pytest.mark.parametrize("name", ["one", "two"])
def test_conftests_of_all_named_directories_are_found(run: Run, name: str) -> None:
    assert run.outcome(f"test_{name}") == "passed"


def test_the_sys_path_entry_of_a_package_is_no_leak(run: Run) -> None:
    assert run.outcome("test_alone") == "passed"
    assert "left behind sys path" not in run.output


# What passes and what skips


@pytest.mark.parametrize(
    "name",
    [
        *("test_monkeypatch", "test_monkeypatch_is_undone", "test_capsys", "test_capfd", "test_caplog"),
        *("test_tmp_path", "test_shared_tmp_path", "test_shared_tmp_path_is_of_one_test", "test_properties"),
        *(
            "test_parametrized[three]",
            "test_parametrized[five]",
            "test_method",
            "test_unittest",
            "test_warnings",
        ),
        *("test_own_warning", "test_marked_by_hook", "test_in_the_controller", "test_ordinary"),
    ],
)
def test_features_of_pytest_work_on_ranks(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("test_skip", "marked"),
        ("test_skipif", "wrong machine"),
        ("test_skip_by_hook", "hook"),
        ("test_importorskip", "could not import 'no_such_module': No module named 'no_such_module'"),
    ],
)
def test_a_skip_keeps_its_reason(run: Run, name: str, reason: str) -> None:
    assert run.outcome(name) == f"skipped: {reason}"


def test_a_module_that_skips_itself_is_skipped_once(run: Run) -> None:
    assert run.output.count("test_absent.py:3: could not import 'no_such_module'") == 1


def test_a_warning_of_all_ranks_appears_once(run: Run) -> None:
    assert len(re.findall(r"test_ordinary\.py:\d+: DeprecationWarning: seen by all", run.output)) == 1
    assert run.output.count("OwnWarning: seen by one") == 1
    assert run.count() == "32 passed, 6 skipped, 2 warnings, 2 errors"


def test_equal_properties_of_ranks_are_recorded_once(run: Run) -> None:
    nodes = run.case("test_properties").iter("property")
    assert sorted((node.get("name"), node.get("value")) for node in nodes) == [
        ("hook", "True"),
        ("loss", "tensor(0.5000)"),
        ("rank", "is 0"),
        ("rank", "is 1"),
        ("same", "1"),
    ]


@pytest.mark.parametrize("name", ["test_unbound_on_a_rank", "test_unbound_in_the_controller"])
def test_without_a_bound_nothing_of_leases_is_imported(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"
