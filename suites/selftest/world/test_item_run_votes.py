"""Votes of ranks in the controller's loop over one item, and the times that they begin again."""

from __future__ import annotations

import pytest

from lockstep.protocol import REBUILT, Agreed, Collecting, ItemStarted, Vote
from suites.selftest.world.steps import DEAD, FINISHED, Steps, waits_in


def test_votes_are_sent_once_all_ranks_have_come() -> None:
    run = Steps(3)
    votes = [Vote("n=1", "passed"), Vote("n=1", "failed")]
    run.take(0, votes[0])
    run.take(2, votes[1])
    assert run.sent(Agreed) == [[], [], []]
    run.take(1, FINISHED)
    agreed = Agreed((votes[0], Vote("the end of the test", "ended"), votes[1]), {"mine": 3})
    assert run.sent(Agreed) == [[agreed], [], [agreed]]
    assert [outcome.vote for outcome in run.outcomes] == [None] * 3
    run.take(0, FINISHED)
    assert run.sent(Agreed) == [[agreed], [], [agreed]]


def test_an_excused_death_is_a_vote() -> None:
    run = Steps()
    run.feature.excuse = "as expected"
    run.take(0, Vote("n=1", "passed"))
    run.take(1, DEAD)
    assert run.feature.votes[1] == Vote("the end of the test", "died")


def test_ranks_that_meet_inside_of_a_case_are_answered_alone() -> None:
    run = Steps(3)
    run._standstill.aborted = "n=1"
    inside, left = Vote("n=1", "met", inside=True), Vote("n=1", "passed")
    run.take(0, inside)
    run.take(1, left)
    run.take(2, inside)
    assert [len(sent) for sent in run.sent(Agreed)] == [1, 0, 1]
    assert [outcome.vote for outcome in run.outcomes] == [None, left, None]
    assert run._standstill.aborted == "n=1"


def test_a_case_that_stood_still_has_failed() -> None:
    run = Steps()
    run._standstill.aborted = "n=1"
    run.take(0, Vote("n=1", "passed"))
    run.take(1, Vote("n=1", "skipped"))
    assert [vote.outcome for vote in run.feature.votes] == ["failed", "skipped"]
    assert run._standstill.aborted == ""
    run.take(0, Vote("n=1", "passed"))
    run.take(1, Vote("n=2", "passed"))
    assert [vote.outcome for vote in run.feature.votes] == ["passed", "passed"]


def test_dead_ranks_have_left_a_world_that_is_rebuilt() -> None:
    run = Steps(3)
    run.feature.excuse = "as expected"
    found = run._diagnose({0: waits_in("all_reduce"), 1: waits_in("barrier")})
    run._standstill.confirm(found)
    run.take(0, DEAD)
    run.take(1, Vote("n=1", REBUILT, inside=True))
    run.take(2, Vote("n=1", "met", inside=True))
    assert not any(outcome.has_left_world for outcome in run.outcomes)
    assert run._standstill.confirm(found)
    run.take(1, Vote("n=1", REBUILT, inside=True))
    run.take(2, Vote("n=1", REBUILT, inside=True))
    assert [outcome.has_left_world for outcome in run.outcomes] == [True, False, False]
    assert not run._standstill.confirm(found)


def test_the_time_of_a_test_begins_when_all_files_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = Steps(timeout=5.0)
    run.take(0, Collecting("a.py"))
    now[0] = 1.0
    run.take(1, Collecting("a.py"))
    assert run.clock.deadline == 61.0
    run.take(0, ItemStarted())
    assert run.clock.deadline == 61.0
    now[0] = 2.0
    run.take(1, ItemStarted())
    assert run.clock.deadline == 7.0


def test_the_time_of_a_test_begins_again_where_all_ranks_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    run = Steps(timeout=60.0)
    now[0] = 10.0
    run.take(0, Vote("n=1", "passed", renews_deadline=True))
    run.take(1, Vote("n=1", "passed"))
    assert run.clock.deadline == 60.0
    run.take(0, Vote("n=1", "passed", renews_deadline=True))
    run.take(1, Vote("n=1", "passed", renews_deadline=True))
    assert run.clock.deadline == 70.0
