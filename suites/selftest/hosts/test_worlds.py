"""Worlds of ranks on two hosts keep the promises of those on one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.features.hosts.join_info import SECRET_VARIABLE
from suites.selftest.hosts.bed import SECRET, two_hosts
from suites.selftest.project import Run


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One session of the project on two hosts of two ranks, whose secret is in a variable.

    They are new interpreters: a test looks at the environment that the kernel shows of a rank.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path)) as bed:
        bed.copy("hosts_worlds")
        (bed.path / "shared").mkdir()
        arguments = (
            *("--junitxml=report.xml", "-o", "junit_family=xunit1", "--ranks-per-host=2"),
            *(f"--shared-dir={bed.path}/shared", "--rank-output-dir=kept"),
        )
        place = ("--meet", f"{bed.addresses[0]}:{bed.port}")
        ended = bed.end(
            *(
                bed.hosts(
                    *(host, *(() if host else arguments)),
                    options=("--node", f"{host}/2", *place),
                    **{SECRET_VARIABLE: SECRET},
                )
                for host in range(2)
            )
        )
        yield Run(bed.directory(0), ended.statuses[0], ended.output)
        assert list((bed.path / "shared").iterdir()) == []
        bed.assert_nothing_is_left()


def text(run: Run, name: str) -> str:
    """Return the report of the one failure of a test."""
    (failed,) = [child for child in run.case(name) if child.tag in ("failure", "error")]
    return failed.text or ""


@pytest.mark.parametrize(
    "name",
    [
        "test_what_fits_on_one_host",
        "test_what_fills_hosts_in_order",
        "test_what_is_spread",
        "test_a_warm_world",
        "test_state_is_restored",
        "test_a_fresh_world",
        "test_a_mesh_over_hosts",
        "test_no_rank_listens_at_all_addresses",
        "test_a_group_of_its_own",
        "test_the_port_of_the_environment",
        "test_collectives_are_recorded",
        "test_a_shared_path",
        "test_off_ranks",
        "test_the_secret_is_not_on_ranks",
        *(f"test_a_layout[{each}]" for each in ("dp2", "tp2", "dp2-tp2")),
    ],
)
def test_it_passes_on_two_hosts(run: Run, name: str) -> None:
    assert run.outcome(name) == "passed"


def test_a_failure_names_the_host_and_the_line_that_runs_it_again(run: Run) -> None:
    report = text(run, "test_what_is_printed")
    assert report.splitlines()[0] == "rank 1 of 2 (host b) failed"
    rerun = report.partition("re-run (seed 0)")[2].splitlines()[1]
    assert rerun.startswith("python -m lockstep hosts --name a ")
    assert " -- test_worlds.py::test_what_is_printed " in rerun
    assert "--ranks-per-host 2 --shared-dir " in rerun


def test_a_failed_case_is_one_of_the_other_host(run: Run) -> None:
    assert "rank 1 of 2 (host b) failed\n" in run.output.partition(" test_subtests [number=1] ")[2]
    assert "contains 1 failed subtest" in run.output


def test_examples_run_in_step_and_shrink(run: Run) -> None:
    report = text(run, "test_a_property")
    assert report.startswith("rank 1 of 2 (host b) failed\nrank 0: passed this example\n")
    assert "number=50" in report


def test_a_death_on_the_other_host_comes_with_its_last_words(run: Run) -> None:
    lines = text(run, "test_a_death_behind_what_is_printed").splitlines()
    assert lines[0] == "rank 1 of 2 (host b) exited with code 7"
    assert lines[1].startswith("rank 0: lost its connection to rank 1 at test_worlds.py:")
    assert lines[2:4] == ["rank 1's last output:", "last words on b"]


@pytest.mark.parametrize(
    ("test", "kept"),
    [
        ("test_what_is_printed", ["printed on a\n", "printed on b\n"]),
        ("test_a_death_behind_what_is_printed", ["last words on a\n", "last words on b\n"]),
    ],
)
def test_what_ranks_print_is_kept_where_pytest_runs(run: Run, test: str, kept: list[str]) -> None:
    folder = run.path / "kept" / "test_worlds.py" / test
    assert [(folder / f"rank-{rank}.stdout").read_text() for rank in range(2)] == kept


def test_what_needs_more_hosts_is_skipped_and_counted(run: Run) -> None:
    assert run.outcome("test_three_hosts") == "skipped: the test needs 3 hosts, this run has 2"
    assert "1 test skipped: 3 hosts needed (python -m lockstep hosts)" in run.output


def test_a_mark_of_more_hosts_than_ranks_says_so(run: Run) -> None:
    assert "ranks(2, hosts=3): there are fewer ranks than hosts" in text(run, "test_more_hosts_than_ranks")
