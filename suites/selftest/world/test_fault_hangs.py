"""Reports of ranks that hang: in Python, a lock, a store, a collective, with the GIL, or stopped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "hangs"
BACKENDS = ("gloo", "shm")


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        (0, "# again"),
        (1, "dist.FileStore("),
        (2, "dist.TCPStore("),
        (3, "dist.recv("),
        (4, 'subprocess.run(["sleep"'),
        (5, "# in Python"),
        (6, "# for ever"),
    ],
)
def test_each_rank_that_hangs_is_named_with_its_line(session: FaultSession, rank: int, code: str) -> None:
    verdict = session["test_nine_ways"]
    assert verdict.outcomes == ["failure"]
    (line,) = (each for each in verdict.head() if each.startswith(f"rank {rank}"))
    assert "timed out after 2 s, in " in line
    assert session.place(code) in line
    assert verdict.seconds < 30  # a bound against hanging


@pytest.mark.parametrize("rank", [7, 8])
def test_a_rank_that_cannot_answer_is_named_too(session: FaultSession, rank: int) -> None:
    lines = [line for line in session["test_nine_ways"].head() if line.startswith(f"rank {rank}")]
    assert any("timed out after 2 s, in " in line for line in lines)


@pytest.mark.parametrize(("name", "code"), [("test_set_up", "# early"), ("test_tear_down", "# late")])
def test_a_hang_is_reported_with_its_rank_and_phase(session: FaultSession, name: str, code: str) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["error"]
    assert verdict.message.startswith(f"failed on {name.removeprefix('test_').replace('_', '')} with ")
    assert verdict.head()[0].startswith("rank 1 of 2 timed out after 1 s, in ")
    assert session.place(code) in verdict.head()[0]
    assert verdict.head()[1] == "rank 0: passed"


def test_a_hang_of_all_ranks_at_one_line_is_shown_once(session: FaultSession) -> None:
    verdict = session["test_sleep_of_all"]
    assert verdict.head()[0].startswith("all 2 ranks timed out after 1 s, in ")
    assert verdict.text.count("time.sleep(100)  # all") == 1


def test_a_stopped_rank_is_reported_before_the_deadline(session: FaultSession) -> None:
    head = session["test_stopped"].head()
    assert head[0] == "rank 1 is stopped"
    assert head[1].startswith("rank 1 of 2 killed by the harness after ")


def test_probing_a_rank_that_holds_the_gil_does_not_wake_it(session: FaultSession) -> None:
    verdict = session["test_sleep_with_the_gil"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith("rank 1 of 2 timed out after 1 s, in ")
    assert session.place("# which a signal would end") in verdict.head()[0]
    assert "in test_sleep_with_the_gil" in verdict.text


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("loop", "never reached: it is at test_faults.py:"),
        ("stop", "did not reach: it is stopped"),
        ("gil", "did not reach: it is not responding, at test_faults.py:"),
    ],
)
def test_a_rank_that_hangs_is_blamed_for_the_one_that_waits(
    session: FaultSession, what: str, where: str
) -> None:
    verdict = session[f"test_{what}_while_the_other_waits"]
    assert verdict.outcomes == ["failure"]
    assert re.match(r"rank 0 waits in barrier #\d+, which rank 1 " + re.escape(where), verdict.head()[0])
    # The deadline comes at the moment when a standstill would be reported.
    assert re.match(r"rank 1 of 2 (timed out after 1 s|killed by the harness after)", verdict.head()[1])


@pytest.mark.parametrize("doing", ["computes", "holds_the_gil"])
def test_a_failure_does_not_wait_for_a_rank_that_is_busy(session: FaultSession, doing: str) -> None:
    verdict = session[f"test_failure_while_the_other_{doing}"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.head()[1].startswith("rank 0: was in ")
    assert "deadline" not in verdict.text


def test_a_thread_that_is_left_does_not_block_its_rank(session: FaultSession) -> None:
    assert session["test_thread_that_lives_on"].outcomes == ["passed"]
    assert session["test_failure_in_a_thread_that_lives_on"].head() == [
        "rank 1 of 2 failed",
        "rank 0: passed",
    ]


def test_a_rank_that_hangs_in_a_case_is_to_blame(
    session: FaultSession,
) -> None:
    head = session["test_sleep_in_a_case"].head()
    place = f"{session.place('# in a case')} in claim"
    assert head[0] == f"rank 0 waits at the end of [n=1] for rank 1: rank 1 is at {place}"
    assert head[1].startswith("rank 1 of 2 timed out after 1 s, in ")


def test_a_rank_in_its_tear_down_is_given_the_time(session: FaultSession) -> None:
    verdict = session["test_failure_while_the_other_clears_up"]
    assert "the only news" in verdict.message
    assert (session.path / "cleared.txt").exists()
