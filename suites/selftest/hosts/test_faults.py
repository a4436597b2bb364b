"""Faults of a rank on another host than the one that runs pytest: the verdicts are those of one host."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from suites.selftest.fault_session import FaultSession, copy_faults, read_verdicts
from suites.selftest.hosts.bed import two_hosts


@pytest.fixture(scope="module")
def faults() -> Iterator[FaultSession]:
    """One session over `projects/faults/hosts`, rank 0 on host a, rank 1 on host b."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as path, two_hosts(Path(path), warm=True) as bed:
        for host in range(2):
            copy_faults("hosts", bed.directory(host))
        with (bed.directory(1) / "test_other_code.py").open("a") as file:
            file.write("# another line\n")
        plugins = ("-p", "healthy", "-p", "stopwatch")
        ended = bed.run(*plugins, "--junitxml=report.xml", "--rank-output-dir=kept")
        verdicts = read_verdicts(bed.directory(0))
        yield FaultSession(bed.directory(0), verdicts, ended.output, ended.statuses[0], "gloo")
        bed.assert_nothing_is_left()


def test_the_healthy_test_after_each_fault_passes(faults: FaultSession) -> None:
    healthy = {name: verdict.outcomes for name, verdict in faults.verdicts.items() if "healthy" in name}
    assert len(healthy) == 14
    assert {name: outcomes for name, outcomes in healthy.items() if outcomes != ["passed"]} == {}
    assert faults["test_where_ranks_are"].outcomes == ["passed"]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        (
            "test_assertion_while_the_other_waits",
            "rank 1 of 2 (host b) failed",
            "rank 0: lost its connection",
        ),
        (
            "test_killed_before_a_collective",
            "rank 1 of 2 (host b) died: SIGKILL",
            "rank 0: lost its connection",
        ),
        ("test_crash", "rank 1 of 2 (host b) died: SIGABRT, at test_faults.py:", "rank 0: passed"),
        ("test_exit", "rank 1 of 2 (host b) exited with code 3", "rank 0: passed"),
        (
            "test_mismatch",
            "mismatch: rank 0 is in all_reduce #1 (float [3]) while rank 1 is in all_gather #1",
            "",
        ),
        (
            "test_left_out",
            "rank 0 waits in all_reduce #1 (float [3]), which rank 1 never reached: it has ended",
            "",
        ),
        (
            "test_sleeps",
            "rank 0 waits in barrier #1, which rank 1 never reached: it is at test_faults.py:",
            "",
        ),
        ("test_stopped", "rank 0 waits in barrier #1, which rank 1 did not reach: it is stopped", ""),
        (
            "test_skip_on_one_rank",
            "rank 1 of 2 (host b) skipped (not today) and others did not",
            "rank 0: passed",
        ),
        ("test_one_bad_subtest", "rank 1 of 2 (host b) failed", "rank 0: "),
    ],
)
def test_a_fault_on_another_host_has_the_verdict_of_one_host(
    faults: FaultSession, name: str, first: str, second: str
) -> None:
    lines = faults[name].head()
    assert lines[0].startswith(first)
    assert lines[1].startswith(second)
    assert "failure" in faults[name].outcomes


def test_a_report_ends_with_the_line_that_runs_it_again_on_the_hosts(faults: FaultSession) -> None:
    (line,) = [line for line in faults["test_crash"].text.splitlines() if "-m lockstep hosts" in line]
    assert "--node 0/2 --meet" in line
    assert " -- test_faults.py::test_crash" in line


def test_output_of_the_failed_rank_is_shown_and_kept(faults: FaultSession) -> None:
    text = faults["test_killed_before_a_collective"].text
    assert "output of rank 1" in text
    assert "output of rank 0" not in text
    kept = {
        path.name: path.read_text() for path in (faults.path / "kept").rglob("*where_ranks_are*/*.stdout")
    }
    assert kept == {f"rank-{rank}.stdout": f"rank {rank} is at home\n" for rank in range(2)}


def test_a_test_on_more_hosts_than_there_are_is_skipped_and_counted(faults: FaultSession) -> None:
    verdict = faults["test_on_more_hosts_than_there_are"]
    assert (verdict.outcomes, verdict.message) == (["skipped"], "the test needs 3 hosts, this run has 2")
    assert "1 test skipped: 3 hosts needed (python -m lockstep hosts)" in faults.output


def test_a_shared_directory_is_asked_for(faults: FaultSession) -> None:
    assert "--shared-dir" in faults["test_shared_directory"].message


def test_other_code_on_a_host_is_an_error_that_names_the_file_and_the_host(faults: FaultSession) -> None:
    text = "test_other_code.py is not the same on host b as on the host that runs pytest"
    assert text in faults["test_it"].text
    assert faults["test_on_one_host"].outcomes == ["passed"]
