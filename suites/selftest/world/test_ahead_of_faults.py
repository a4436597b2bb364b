"""Ranks that have the order for the next test drop it where the current one did not go well on all."""

from __future__ import annotations

import pytest

from suites.selftest.project import Run, copy_project, run_pytest

OUTCOMES = {
    "test_fails_on_one": "failure",
    "test_dies_on_one": "failure",
    "test_exits_on_one": "failure",
    "test_hangs_on_one": "failure",
    "test_stands_still": "failure",
    "test_skips_on_one": "failure",
    "test_skips_on_all": "skipped: on all ranks",
    "test_xfails_on_all": "skipped: on all ranks",
    "test_is_interrupted_on_one": "failure",
    "test_warns_on_one": "failure",
    "test_leaves_a_thread_on_one": "error",
    "test_leaves_a_collective_on_one": "failure",
    "test_ends_its_group": "error",
    "test_set_up_fails_on_one": "error",
    "test_tear_down_fails_on_one": "error",
    "test_subtest_fails_on_one": "failure, failure",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("ahead_of_faults")
    copy_project("ahead_of_faults", path)
    (path / "pytest.ini").write_text("[pytest]\nranks_leaks = error\n")
    return run_pytest(path)


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_next_test_runs_once_and_after_the_report(run: Run, name: str) -> None:
    assert run.outcome(name) == OUTCOMES[name]
    for rank in (0, 1):
        assert len((run.path / f"after-{name}-{rank}.txt").read_text().split()) == 1


def test_what_follows_passes(run: Run) -> None:
    following = [name for name in run.cases if name.startswith("test_after")]
    assert len(following) == len(OUTCOMES)
    assert {run.outcome(name) for name in following} == {"passed"}
