"""Layouts together with the rest of the harness: one session with `--skew`, `--timeline` and goldens."""

from __future__ import annotations

import pytest
from hypothesis import find

from lockstep.layouts.strategies import layout_sizes
from suites.selftest.project import Run, copy_project, run_pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = copy_project("layouts", tmp_path_factory.mktemp("layouts"))
    (path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return run_pytest(path, "test_together.py", "--skew", "3", "--timeline", "kept", "--update-goldens")


@pytest.mark.parametrize(
    "name",
    [
        *("test_right[dp2]", "test_golden[dp2]", "test_golden[tp2]"),
        *(f"test_counts[{each}]" for each in ("dp2", "dp2-tp16", "dp64", "dp64-tp16")),
    ],
)
def test_it_passes(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


def test_skew_finds_a_race_of_a_plan(run: Run) -> None:
    text = run.failure("test_race[dp2]")
    assert (
        "CollectiveRace: all_reduce #3 (float64[6, 4], 2 ranks), begun at plan.py:38, was not waited for"
        in text
    )
    assert "test_together.py::test_race[dp2]' --skew 3" in text


def test_a_corrupted_sum_is_one_of_replicas_that_differ(run: Run) -> None:
    text = run.failure("test_corrupted[dp2]")
    assert "injected by the test: rank 1" in text
    assert "dp2 is not the unsharded model (step 0)" in text
    assert "is right at dp 0 alone: replicas differ" in text


def test_a_killed_rank_is_the_cause(run: Run) -> None:
    text = run.failure("test_killed[dp2]")
    assert text.splitlines()[0] == "rank 1 of 2 died: SIGKILL"
    assert "before all_reduce #3 (float64[6], 2 ranks)" in text


def test_the_timeline_of_a_layout_is_kept(run: Run) -> None:
    assert (run.path / "kept/test_together.py/test_race[dp2]/timeline.html").is_file()


def test_each_layout_has_a_golden(run: Run) -> None:
    kept = sorted(each.name for each in (run.path / "goldens/test_together").iterdir())
    assert kept == ["dp2-2-gloo.txt", "tp2-2-gloo.txt"]


def test_a_drawn_layout_shrinks_to_the_smallest(run: Run) -> None:
    text = run.failure("test_drawn")
    assert "AssertionError: dp2 is not the unsharded model (step 0)" in text
    assert "rows=15," in text


def test_a_layout_smaller_than_the_world_has_copies() -> None:
    sizes = layout_sizes(4, dp=(1, 2, 4), tp=(1, 2))
    assert find(sizes, lambda _: True) == {"copies": 2, "dp": 2, "tp": 1}
    assert find(sizes, lambda each: each["tp"] == 2) == {"copies": 2, "dp": 1, "tp": 2}
    assert find(sizes, lambda each: each["copies"] == 1) == {"copies": 1, "dp": 4, "tp": 1}
    with pytest.raises(
        ValueError, match=r"layout_sizes\(3, dp=\(1, 2\)\): no layout of 2 or more ranks divides 3"
    ):
        layout_sizes(3, dp=(1, 2))
