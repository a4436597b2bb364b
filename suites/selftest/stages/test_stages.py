"""Stages: what runs before a test on a world of another size, and leaves files for it."""

from __future__ import annotations

import inspect
import re
import shlex
from typing import TYPE_CHECKING

import pytest

import lockstep
from lockstep.features.stages.stage import Stage, _find_path
from suites.selftest.project import Run, run_pytest
from suites.selftest.warm_pytest import run_module

if TYPE_CHECKING:
    from suites.selftest.project import Project

PROJECT = "stages"
OPTIONS = ("--rank-output-dir=output",)
ENVIRON = {"COLUMNS": "200"}
SAVED = """
import lockstep

@lockstep.stage(ranks=4)
def saved(world):
    (world.shared_tmp_path / str(world.rank)).touch()
"""


def text_of(run: Run, name: str) -> str:
    """Return the text of an error at the set-up of a test."""
    (error,) = run.case(name)
    assert error.tag == "error"
    return error.text or ""


PASSED = (
    *("test_load", "test_is_of_one_test", "test_same_size", "test_without_group", "test_used", "test_chain"),
    *("test_sizes[1-rank]", "test_sizes[2-ranks]", "test_method", "test_module_has_run_for_each"),
    *(f"test_parameters[{letter}-{number}]" for number in (1, 2) for letter in "ab"),
    *(f"test_module_{which}[{kind}]" for which in ("first", "second") for kind in "xy"),
    *("test_after_failure", "test_module_failed_once", "test_warm"),
)


@pytest.mark.parametrize("name", PASSED)
def test_what_stages_leave_reaches_tests(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


def test_a_stage_has_the_marks_of_its_test(run: Run) -> None:
    assert run.outcome("test_skipped") == "skipped: no need"
    assert run.outcome("test_xfail").startswith("skipped")
    assert run.outcome("test_xfail_in_stage").startswith("skipped")


def test_a_skip_in_a_stage_skips_the_test(run: Run) -> None:
    assert run.outcome("test_skip_in_stage") == "skipped: nothing to save"


@pytest.mark.parametrize(
    ("name", "stage", "ranks", "verdict"),
    [
        ("test_failing_stage", "fails", 4, "rank 3 of 4 failed\n"),
        ("test_dying_rank", "dies", 3, "rank 1 of 3 died: SIGKILL\n"),
        ("test_hang", "hangs", 3, "ranks 0, 2 wait in barrier #1, which rank 1 never reached"),
        ("test_module_failure", "fails_once", 3, "all 3 ranks failed"),
        ("test_module_failure_again", "fails_once", 3, "all 3 ranks failed"),
    ],
)
def test_a_failure_is_an_error_that_names_the_stage(
    run: Run, name: str, stage: str, ranks: int, verdict: str
) -> None:
    text = text_of(run, name)
    assert text.startswith(f"in the stage `{stage}`, on {ranks} ranks before the test:\n{verdict}")
    assert "does not run" not in text


def test_the_summary_names_stage_and_rank(run: Run) -> None:
    (line,) = (line for line in run.lines if line.startswith("ERROR test_stages.py::test_failing_stage"))
    assert line.endswith("stage `fails`: rank 3: AssertionError: could not be saved")


def test_the_output_of_a_stage_is_shown_and_kept(run: Run) -> None:
    assert "printed on 3" in run.output
    kept = run.path / "output" / "test_stages.py" / "test_failing_stage" / "fails" / "rank-3.stdout"
    assert kept.read_text() == "printed on 3\n"


def test_a_stage_requested_by_name_is_refused(run: Run) -> None:
    sentence = "the stage `saved` has not run: a test requests it as an argument"
    assert sentence in run.failure("test_by_name")


def test_the_line_that_runs_again_runs_the_stage(run: Run) -> None:
    line = next(line for line in text_of(run, "test_failing_stage").splitlines() if "pytest test_" in line)
    done = run_module(*shlex.split(line), cwd=run.path)
    assert "in the stage `fails`, on 4 ranks before the test:\nrank 3 of 4 failed" in done.stdout
    assert "1 error in" in done.stdout


def test_the_first_error_ends_the_run_under_x(project: Project) -> None:
    project.write(f"{SAVED}    assert world.rank\n\ndef test_a(saved): pass\n\ndef test_b(): pass\n")
    assert "1 error in" in project.run("-x")


def test_last_failed_and_xdist(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("options")
    (path / "pytest.ini").write_text("[pytest]\n")
    tests = "\n".join(
        f"@pytest.mark.ranks(2)\ndef test_{n}(world, saved):\n    assert len(list(saved.iterdir())) == {n}\n"
        for n in (3, 4)
    )
    (path / "test_sample.py").write_text(f"import pytest\n{SAVED}\n{tests}")
    assert run_pytest(path, "-n", "2").count() == "1 failed, 1 passed"
    assert run_pytest(path, "--lf").count() == "1 failed"


def test_each_world_of_a_stage_counts_against_ranks_at_once(project: Project) -> None:
    project.write(f"{SAVED}\ndef test_a(saved): pass\n", ini="ranks_at_once = 3")
    output = project.run()
    assert "in the stage `saved`, on 4 ranks before the test: a world of 4 ranks is larger than" in output
    assert "`ranks_at_once = 3`" in output
    project.write(f"{SAVED}\ndef test_a(saved): pass\n", ini="ranks_at_once = 4")
    assert "1 passed" in project.run()


def test_a_test_off_ranks_is_refused(project: Project) -> None:
    (project.path / "test_sample.py").write_text(
        "import lockstep\n\n@lockstep.stage(ranks=4)\ndef saved(): pass\n\ndef test_a(saved): pass\n"
    )
    output = project.run()
    assert re.search(r"test_a: the fixture `saved` exists only on ranks: mark the test", output)


def test_a_fake_world_is_refused(project: Project) -> None:
    project.write(f"{SAVED}\n@pytest.mark.ranks(2, needs=())\ndef test_a(saved): pass\n")
    assert "the test has a stage (`saved`), and a fake world is one process" in project.run(
        "--backend", "fake"
    )


def plain() -> None: ...


@pytest.mark.ranks(2)
def marked() -> None: ...


async def waits() -> None: ...


def yields():  # type: ignore[no-untyped-def]
    yield


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: lockstep.stage(ranks="4"), r"stage\(ranks='4'\): ranks is a whole number"),
        (lambda: lockstep.stage(plain), r"ranks is a whole number: write @lockstep.stage\(ranks=4\)"),
        (lambda: lockstep.stage(ranks=True), "a whole number"),
        (lambda: lockstep.stage(ranks=0), r"stage\(ranks=0\): a world has 1 to 10000 ranks"),
        (lambda: lockstep.stage(ranks=10**30), r"ranks=10+\): a world has 1 to 10000 ranks"),
        (lambda: lockstep.stage(ranks=2, scope="test"), "choose function, class, module, package, session"),
        (lambda: lockstep.stage(ranks=2)(yields), "stage `yields` yields"),
        (lambda: lockstep.stage(ranks=2)(waits), "stage `waits` is a coroutine function"),
        (lambda: lockstep.stage(ranks=2)(marked), "stage `marked` has a mark"),
        (lambda: lockstep.stage(ranks=2)(Run), "is no function"),
    ],
)
def test_bad_input_is_refused(use, error: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((TypeError, ValueError), match=error):
        use()


def test_the_fixture_of_a_stage_requests_what_the_stage_does() -> None:
    def saved(world: object, *rest: object, folder: object = None, **others: object) -> None: ...

    found = inspect.signature(_find_path(Stage(saved, 2, "function"))).parameters
    assert [*found] == ["world", "folder", "request"]
