"""The fixture `sweep`: what it finds on ranks, and how it reports that."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from suites.selftest.project import PROJECTS, WITHOUT_PLUGINS, Run, copy_project, line_of, run_pytest

PROJECT = "sweep"
OPTIONS = ("--sweep-points=14", "--timeline=pages")
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
    found = re.match(r"14 of 14 points held: (.*?)[;]", summary(run, "test_whole_or_absent"))
    assert found is not None, run.output
    kinds = {word.split()[0] for word in found[1].split(", ")}
    assert kinds == {"kill", "torn", "all", "power", "fail", "full", "delay"}


def test_a_marker_that_is_written_first_is_found(run: Run) -> None:
    text = run.failure("test_marker_first")
    assert (
        "2 of 3 points do not hold; the smallest: rank 1 is killed (SIGKILL) half-way through write 1" in text
    )
    first, problem, again, *_ = rows(run, "test_marker_first")
    where = f"{place('file.flush()', 'saver.py')}; after open of step-2/part-1.tmp"
    what = "rank 1 is killed (SIGKILL) half-way through write 1: write of step-2/part-1.tmp"
    assert first == f"{what} at {where}"
    assert problem.startswith("    the claim failed: rank 0: FileNotFoundError: [Errno 2]")
    assert problem.endswith(f"part-1' at {place('read_bytes()', 'saver.py')}")
    assert again.endswith("--sweep-point 'torn rank 1 write 1'")


@pytest.mark.parametrize(("name", "count"), [("test_written_in_place", 1), ("test_appended", 5)])
def test_half_of_a_write_that_is_loaded_is_found(run: Run, name: str, count: int) -> None:
    text = run.failure(name)
    assert f"1 of {count} points does not hold" in text
    assert "the smallest: rank 0 is killed (SIGKILL) half-way through write 1: write of " in text


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
    text = run.failure("test_polls_for_ever")
    assert f"a hang: after 8 s rank 0 is in {where} in save; then the claim held\n" in text


def test_a_collective_that_a_rank_leaves_out_is_a_hang(run: Run) -> None:
    text = run.failure("test_leaves_a_collective_out")
    assert "a hang: rank 1 waits in barrier #2, which rank 0 never reached: it has ended it" in text
    assert "4 of 4 points do not hold" in text
    problems = [line for line in rows(run, "test_leaves_a_collective_out") if "    a hang: " in line]
    assert [line.partition("; then ")[2] for line in problems] == ["the claim held"] * 4


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


def test_a_claim_that_hangs_fails_its_point_alone(run: Run) -> None:
    text = run.failure("test_claim_hangs")
    assert "1 of 4 points does not hold" in text
    assert "\nthe claim hung: rank 0 waits in barrier #" in text


def test_directories_may_be_each_ranks_own(run: Run) -> None:
    assert run.outcome("test_own_folders_and_torch_save") == "passed", run.output
    assert summary(run, "test_own_folders_and_torch_save") == "8 of 8 points held: torn 2, full 6"


def test_what_cpp_has_written_is_seen_by_polling(run: Run) -> None:
    where = place("dist.barrier()  # after C++")
    seen = f"before collective 1: barrier at {where}; after a write by C++ of mapped (seen by polling)"
    assert {line.partition(" gets an exception ")[2] for line in rows(run, "test_polled")[::3]} >= {seen}
    assert summary(run, "test_polled").endswith("; written by code that is not seen: mapped")


def test_the_page_of_a_timeline_has_each_point(run: Run) -> None:
    def dots(name: str) -> Counter[str]:
        page = (run.path / "pages" / "test_savers.py" / name / "timeline.html").read_text()
        return Counter(re.findall(r'<circle class="point (\w+)"', page))

    assert dots("test_whole_or_absent") == {"holds": 14}
    assert dots("test_marker_first") == {"holds": 1, "fails": 2}
    assert dots("test_nothing_struck") == {"missed": 2}


def test_workers_divide_the_points(run: Run, tmp_path: Path) -> None:
    path = copy_project(PROJECT, tmp_path)
    plugins = WITHOUT_PLUGINS | {"PYTEST_PLUGINS": "lockstep.plugin,xdist.plugin"}
    divided = run_pytest(path, "test_savers.py", "-k", "divided", "-n2", "--sweep-points=all", **plugins)
    assert divided.count() == "2 passed", divided.output
    claimed = (path / "claimed-0").read_text().splitlines()
    points = [line for line in claimed if line != "the undisturbed run"]
    assert len(claimed) == len(points) + 2
    assert len(points) == len(set(points)) == 27
    (line,) = (line for line in divided.lines if line.startswith("sweep "))
    assert line == "sweep test_savers.py::test_divided: 27 of 27 points held: fail 16, full 11"


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


@pytest.mark.parametrize(
    "name",
    [
        *("test_one_sweep_a_test", "test_refusals", "test_without_a_group"),
        *("test_in_a_fake_world[rank-0-of-2]", "test_after_all"),
    ],
)
def test_a_wrong_call_is_refused(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed", run.output


def test_one_point_runs_again(run: Run) -> None:
    option = "--sweep-point=kill rank 1 open 1"
    again = run_pytest(run.path, "test_savers.py", "-k", "marker_first", option, **WITHOUT_PLUGINS)
    assert "1 of 1 points does not hold" in again.failure("test_marker_first")


def test_a_wrong_option_gets_a_sentence(run: Run) -> None:
    done = run_pytest(run.path, "test_savers.py", "--sweep-points=0", **WITHOUT_PLUGINS)
    assert done.lines[-2:] == ["ERROR: --sweep-points '0': a number from 1, or all", ""]
