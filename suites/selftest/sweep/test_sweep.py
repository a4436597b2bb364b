"""The fixture `sweep`: what it finds on ranks, and how it reports that."""

from __future__ import annotations

import re

import pytest

from suites.selftest.project import PROJECTS, WITHOUT_PLUGINS, Run, line_of, run_pytest

PROJECT = "sweep"
OPTIONS = ("--sweep-points=24",)
INI = ""
ENVIRON = {"COLUMNS": "200"}
FILES = PROJECTS / "sweep"


def place(code: str, file: str = "test_savers.py") -> str:
    return f"{file}:{line_of(code, FILES / file)}"


def rows(run: Run, name: str) -> list[str]:
    """Return the lines of the table of a sweep that does not hold."""
    return run.failure(name).partition(" sweep ---")[2].splitlines()[1:]


def summary(run: Run, name: str) -> str:
    (line,) = (line for line in run.lines if line.startswith("sweep ") and f"::{name}: " in line)
    return line.partition(": ")[2]


def test_a_right_saver_holds_under_every_kind(run: Run) -> None:
    assert run.outcome("test_whole_or_absent") == "passed", run.output
    found = re.match(r"24 of 24 points held: (.*?)[;]", summary(run, "test_whole_or_absent"))
    assert found is not None, run.output
    kinds = {word.split()[0] for word in found[1].split(", ")}
    assert kinds >= {"kill", "all", "power", "fail", "full", "delay"}


def test_a_marker_that_is_written_first_is_found(run: Run) -> None:
    text = run.failure("test_marker_first")
    assert "points do not hold; the smallest: rank 1 is killed (SIGKILL) before mkdir 1: mkdir of" in text
    first, problem, again, *_ = rows(run, "test_marker_first")
    where = place("here.mkdir", "saver.py")
    assert first == f"rank 1 is killed (SIGKILL) before mkdir 1: mkdir of step-2 at {where}"
    assert problem.startswith("    the claim failed: rank 0: FileNotFoundError: [Errno 2]")
    assert problem.endswith(f"part-1' at {place('read_bytes()', 'saver.py')}")
    assert again.endswith("--sweep-point 'kill rank 1 mkdir 1'")


def test_a_rank_that_publishes_without_the_others_is_found(run: Run) -> None:
    text = run.failure("test_published_alone")
    # `Path.mkdir(exist_ok=True)` forgives an error once the other rank has made the directory.
    point = r"(mkdir 1: mkdir of step-2|open 1: open of step-2/part-1.tmp) at saver.py"
    smallest = f"the smallest: rank 1 gets an exception before {point}"
    assert re.search(f"[45] of 14 points do not hold; {smallest}", text), text


def test_what_was_not_synced_is_lost_with_the_power_alone(run: Run) -> None:
    problems = [line for line in rows(run, "test_unsynced") if line.startswith("rank")]
    assert problems
    assert all("lose power: what was not synced is lost" in line for line in problems)


def test_a_survivor_that_waits_for_ever_is_a_hang(run: Run) -> None:
    where = place("time.sleep(0.01)")
    assert f"a hang: after 8 s rank 0 is in {where} in save\n" in run.failure("test_polls_for_ever")


def test_a_collective_that_a_rank_leaves_out_is_a_hang(run: Run) -> None:
    text = run.failure("test_leaves_a_collective_out")
    assert "a hang: rank 1 waits in barrier #2, which rank 0 never reached: it has ended it" in text
    assert "4 of 4 points do not hold" in text


def test_a_file_that_appears_late_is_missed(run: Run) -> None:
    assert run.failure("test_looks_once").startswith("all 2 ranks failed")
    first, *_ = rows(run, "test_looks_once")
    line = line_of("# rank 0 writes after it", FILES / "test_savers.py")
    what = "rank 1 does not see yet what others write before collective 1: barrier"
    assert first == f"{what} at test_savers.py:{line}"


def test_two_threads_on_one_group_are_permuted(run: Run) -> None:
    text = run.failure("test_threads_share_a_group")
    assert "lets another thread go first before collective" in text


def test_a_rank_that_dies_in_the_claim_is_named(run: Run) -> None:
    assert "in the claim, rank 1 exited with code 3" in run.failure("test_rank_dies_in_the_claim")


def test_directories_may_be_each_ranks_own(run: Run) -> None:
    assert run.outcome("test_own_folders_and_cpp") == "passed", run.output
    assert summary(run, "test_own_folders_and_cpp").endswith("written by code that is not seen: state.pt")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("test_no_point", "the function has no point: it has called no collective"),
        ("test_nothing_read", "the claim has not looked at anything below the directories"),
        ("test_nothing_struck", "no point has struck: rank "),
        ("test_prepare_fails", "AssertionError: not here"),
        ("test_undisturbed_claim_fails", "assert [] == ['never']"),
    ],
)
def test_a_sweep_that_proves_nothing_fails(run: Run, name: str, why: str) -> None:
    assert why in run.failure(name)


@pytest.mark.parametrize("name", ["test_one_sweep_a_test", "test_refusals", "test_after_all"])
def test_a_wrong_call_is_refused(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed", run.output


def test_one_point_runs_again_and_an_unknown_one_is_refused(run: Run) -> None:
    again = run_pytest(
        run.path,
        "test_savers.py",
        "-k",
        "marker_first",
        "--sweep-point=kill rank 1 open 1",
        **WITHOUT_PLUGINS,
    )
    assert "1 of 1 points does not hold" in again.failure("test_marker_first")
    unknown = run_pytest(
        run.path,
        "test_savers.py",
        "-k",
        "marker_first",
        "--sweep-point=kill rank 1 open 99",
        **WITHOUT_PLUGINS,
    )
    text = unknown.failure("test_marker_first")
    assert "--sweep-point 'kill rank 1 open 99': there is no such point; there are rank 0:" in text


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--sweep-points=0", "--sweep-points '0': a number from 1, or all"),
        ("--sweep-seconds=-1", "--sweep-seconds -1.0: a number of seconds above 0"),
        ("--sweep-point=boom", "--sweep-point 'boom': write a point as reports name it"),
        ("--sweep-point=kill rank 1 sing 2", "the operations are collective, open, write"),
    ],
)
def test_a_wrong_option_gets_a_sentence(run: Run, option: str, why: str) -> None:
    assert why in run_pytest(run.path, "test_savers.py", option, **WITHOUT_PLUGINS).output
