"""Runs with few ranks or none, under pytest -n, with a debugger, and with other plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from lockstep.controller.pytest_internals import add_failed_tear_down
from suites.selftest.project import Project, Run, copy_project, run_pytest


def test_a_run_without_ranks_starts_no_process(tmp_path: Path) -> None:
    copy_project("census", tmp_path)
    test = "import pytest\n\n@pytest.mark.parametrize('n', range(3))\ndef test_x(n): pass"
    (tmp_path / "test_plain.py").write_text(test)
    done = run_pytest(tmp_path, "-p", "census", fresh=True)
    assert done.count() == "3 passed"
    assert "torch: False, children: 0" in done.lines


def test_collecting_only_lists_items_and_starts_nothing(tmp_path: Path) -> None:
    copy_project("census", tmp_path)
    copy_project("plain_and_ranks", tmp_path)
    done = run_pytest(tmp_path, "-p", "census", "--co", "-q", fresh=True)
    assert done.lines[:2] == ["test_it.py::test_x", "test_it.py::test_y"]
    assert "torch: False, children: 0" in done.lines


@pytest.mark.parametrize("option", ["--pdb", "--trace"])
def test_a_debugger_is_refused_with_a_remedy(pytester: pytest.Pytester, option: str) -> None:
    copy_project("plain_and_ranks", pytester.path)
    result = pytester.runpytest_subprocess(option, timeout=180)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().strip() == (
        f"ERROR: {option} alone does not work in ranks, and test_it.py::test_x runs on ranks. Add "
        "--rank-pdb 0 for a debugger in rank 0 (it works without --pdb, too), or deselect the tests marked "
        "`ranks` with -m 'not ranks'"
    )


def test_a_debugger_is_fine_where_no_ranks_run(pytester: pytest.Pytester) -> None:
    copy_project("plain_and_ranks", pytester.path)
    result = pytester.runpytest_subprocess("--pdb", "-m", "not ranks", timeout=180)
    result.assert_outcomes(passed=1, deselected=1)


def test_pytest_n_has_a_controller_in_each_of_its_workers(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    copy_project("xdist", pytester.path)
    result = pytester.runpytest_subprocess("-n2", timeout=180)
    result.assert_outcomes(failed=1, passed=11)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 failed",
            "rank 0: passed",
            "FAILED test_it.py::test_marked[[]7[]] - rank 1: assert (1 + 7) != 8",
        ]
    )
    ranks = [f"gw{number}-{rank}" for number in (0, 1) for rank in (0, 1)]
    sessions = (pytester.path / "sessions.txt").read_text().split()
    assert sorted(sessions) == sorted([*ranks, "gw0-none", "gw1-none", "main-none"])


# The second one stands in for pytest-randomly, which is not installed here.
PLUGINS = ("-p", "sender", "-p", "randomly", "--strict-markers")


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Tests under hooks of all kinds."""
    path = tmp_path_factory.mktemp("hooked")
    for name in ("census", "worker_plugins", "hooked"):
        copy_project(name, path)
    return run_pytest(path, "-v", "-p", "census", *PLUGINS, fresh=True)


@pytest.fixture(scope="module")
def only_set_up(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("only_set_up")
    for name in ("worker_plugins", "plain_and_ranks"):
        copy_project(name, path)
    return run_pytest(path, "--setup-only", "-p", "no:xdist", *PLUGINS)


def verdicts(done: Run) -> dict[str, str]:
    """Return the words of `-v`, by node id."""
    return dict(line.split()[:2] for line in done.lines if "::" in line)


def test_a_controller_of_ranks_does_not_import_torch(hooked: Run) -> None:
    (census,) = (line for line in hooked.lines if line.startswith("torch: "))
    assert census.startswith("torch: False, children: ")


def test_a_fixture_kept_for_an_item_that_runs_elsewhere_ends(
    hooked: Run,
) -> None:
    """Under pytest -n the item that comes next in a file may go to another controller."""
    outcomes = verdicts(hooked)
    assert [outcomes[f"test_first.py::{name}"] for name in ("test_a", "test_plain")] == ["PASSED", "PASSED"]
    assert outcomes["test_second.py::test_b"] == "PASSED"
    assert "test_first.py::test_elsewhere" not in outcomes
    assert (hooked.path / "ended.txt").read_text() == "test_first test_second "


@pytest.mark.parametrize("on_ranks", ["passed", "failed"])
def test_a_wide_fixture_that_fails_in_tear_down_hides_no_failure_of_ranks(
    request: pytest.FixtureRequest, on_ranks: Literal["passed", "failed"]
) -> None:
    item = request.node
    reports = [pytest.TestReport("id", item.location, {}, on_ranks, "of ranks", "teardown")]
    add_failed_tear_down(item, pytest.CallInfo.from_call(lambda: [].pop(), "teardown"), reports)
    assert {report.outcome for report in reports} == {"failed"}
    assert ["pop from empty list" in report.longreprtext for report in reports] == (
        [True] if on_ranks == "passed" else [False, True]
    )


def test_attributes_of_reports_by_hooks_reach_the_controller(
    hooked: Run,
) -> None:
    assert (hooked.path / "reports.txt").read_text().splitlines() == [
        f"0 {{'what': ('is', '{when}')}} <function pytest_runtest_makereport.<locals>.<lambda>"
        for when in ("setup", "call", "teardown")
    ]


def test_ranks_have_the_worker_input_of_plugins(hooked: Run) -> None:
    assert verdicts(hooked)["test_workers.py::test_input"] == "PASSED"
    assert "= 5 passed in " in hooked.lines[-1]
    assert [(hooked.path / f"seen-{rank}-xdist.txt").read_text() for rank in (0, 1)] == ["once", "once"]


def test_ranks_have_the_worker_input_without_xdist(only_set_up: Run) -> None:
    assert [(only_set_up.path / f"seen-{rank}-none.txt").read_text() for rank in (0, 1)] == ["once", "once"]


def test_set_up_without_tests_does_not_crash(only_set_up: Run) -> None:
    assert_only_set_up(only_set_up)


def test_a_plan_of_set_ups_does_not_crash(tmp_path: Path) -> None:
    assert_only_set_up(run_pytest(copy_project("plain_and_ranks", tmp_path), "--setup-plan"))


def assert_only_set_up(done: Run) -> None:
    assert done.status == pytest.ExitCode.OK
    assert [line for line in done.lines if "test_it.py::test_y (fixtures used: " in line]
    assert "= no tests ran in " in done.lines[-1]
    assert "Error" not in "\n".join(done.lines)


def test_a_plugin_that_fails_in_configure_node_is_named(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_configure_node(node): node.never_heard_of")
    copy_project("plain_and_ranks", pytester.path)
    result = pytester.runpytest_subprocess(timeout=180)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(
        ["no world of 2 ranks *`pytest_configure_node`*AttributeError: *never_heard_of*"]
    )


def test_files_outside_of_the_rootdir_run_on_ranks(tmp_path: Path) -> None:
    """As those of an installed package do (`--pyargs`); two that are both arguments may have the same ids."""
    test = "import pytest\n@pytest.mark.ranks(2)\ndef test_x(world): assert world.size == {size}\n"
    for room, size in (("one", 2), ("other", 3)):
        (tmp_path / "lib/package" / room).mkdir(parents=True)
        (tmp_path / "lib/package" / room / "__init__.py").touch()
        (tmp_path / "lib/package" / room / "test_it.py").write_text(test.format(size=size))
    (tmp_path / "lib/package/__init__.py").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/pytest.ini").write_text("[pytest]\npythonpath = ../lib\n")
    words = ("--pyargs", "package.one", "package.other", "-p", "no:cacheprovider")
    run = run_pytest(tmp_path, *words, cwd="project")
    assert run.count() == "1 failed, 1 passed"
    assert "../lib/package/other/test_it.py:3: AssertionError" in run.lines


@pytest.mark.parametrize(
    ("before", "collecting", "then"),
    [
        ("700, 7", "10_000, 7", "700, 7"),
        ("0, 7", "0, 7", "0, 7"),
        ("50_000, 7", "50_000, 7", "50_000, 7"),
        ("700, 7", "10_000, 7", "900, 5"),
    ],
)
def test_garbage_is_looked_for_rarely_while_tests_with_ranks_are_collected(
    project: Project, before: str, collecting: str, then: str
) -> None:
    """Where a project has it off, or rarer still, or a file sets its own thresholds, these stand.

    Of the third Python 3.14 knows nothing.
    """
    (project.path / "conftest.py").write_text(f"import gc\ngc.set_threshold({before})\n")
    (project.path / "test_it.py").write_text(
        "import gc\nimport pytest\n"
        "COLLECTING = gc.get_threshold()[:2]\n"
        f"{f'gc.set_threshold({then})' if then != before else ''}\n"
        "@pytest.mark.ranks(2)\ndef test_on_ranks(): pass\n"
        f"def test_it():\n    assert COLLECTING == ({collecting})\n"
        f"    assert gc.get_threshold()[:2] == ({then})\n"
    )
    output = project.run()
    assert "2 passed" in output, output
    (project.path / "test_it.py").write_text(
        f"import gc\nBEFORE = gc.get_threshold()[:2]\ndef test_it(): assert BEFORE == ({before})\n"
    )
    assert "1 passed" in project.run()
