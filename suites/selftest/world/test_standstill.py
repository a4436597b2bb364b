"""Ranks that stand still, found and ended by the controller's loop over one item."""

from __future__ import annotations

import math

import pytest

from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import TRIAL, AbortGroup, Issued, Probe, RankStatus
from lockstep.world.outcome import Stuck
from suites.selftest.world.steps import Steps, waits_in


def test_a_standstill_is_ended_once_it_is_seen_twice() -> None:
    run = Steps()
    waits = waits_in("all_reduce"), waits_in("barrier")
    run._probes.unanswered = {0, 1}
    for rank, status in enumerate(waits):
        run._probes.take(rank, status)
        run.ranks[rank].answer = status
    run._probe({0, 1})
    assert run.feature.calls == [("probe", set())]
    assert run.sent(Probe) == [[Probe(names_place=True)]] * 2
    assert run._probes.answers == {}
    assert run._pending() == {0, 1}
    run.probe_twice(*waits)
    assert ("standstill", {0, 1}) in run.feature.calls
    assert run._pending() == set()
    assert run._standstill.diagnosis is not None
    for rank, outcome in enumerate(run.outcomes):
        assert isinstance(outcome.fate, Stuck)
        assert outcome.fate.status is outcome.status is waits[rank]
        assert outcome.fate.output == f"log of {rank}"
        assert outcome.fate.captured == (("stdout", f"printed by {rank}"),)


def test_a_rank_that_has_not_answered_is_silent() -> None:
    run = Steps()
    run._probes.unanswered = {0, 1}
    run._probe({0})
    assert run.feature.calls == [("probe", {0})]
    stopped = run.ranks[0].answer = RankStatus("", "an unknown place: it is stopped", state="stopped")
    run.ranks[0].stopped = True
    run._probe({0, 1})
    assert run.feature.calls[1:3] == [("answer", 0, stopped), ("probe", {1})]


def test_an_idle_rank_is_not_compared() -> None:
    run = Steps()
    run.probe_twice(waits_in("all_reduce"), RankStatus("", "", state="idle"))
    assert "standstill" not in run.feature.names()


def test_nothing_stands_still_while_an_excused_rank_is_missed() -> None:
    run = Steps()
    run.outcomes[0].excuse = "as expected"
    run.probe_twice(waits_in("all_reduce"), waits_in("barrier"))
    assert "standstill" not in run.feature.names()


def test_ranks_that_a_feature_gives_up_are_killed() -> None:
    run = Steps()
    run.feature.lost = {1}
    run.probe_twice(waits_in("all_reduce"), waits_in("barrier"))
    assert [rank.killed for rank in run.ranks] == [False, True]
    assert run._pending() == {0, 1}
    run._probes.take(0, waits_in("all_reduce"))
    run._probes.take(1, waits_in("barrier"))
    run._probe({0, 1})
    assert run.feature.names().count("standstill") == 1
    run = Steps()
    run.feature.lost = set()
    run.probe_twice(waits_in("all_reduce"), waits_in("barrier"))
    assert run._pending() == {0, 1}


def test_a_wait_that_ends_by_itself_is_not_ended() -> None:
    run = Steps()
    begun = Issued(DEFAULT_GROUP, (), 1, "all_reduce", ("float",), ((3,),), in_flight=True, timeout=5.0)
    waits = RankStatus("", "a.py:1 in f", issued=(begun,))
    run.probe_twice(waits, RankStatus("", "b.py:2 in g"))
    assert "standstill" in run.feature.names()
    assert run._pending() == {0, 1}


def test_what_a_feature_says_ranks_wait_for_is_in_the_diagnosis() -> None:
    run = Steps()
    run.feature.waits = {1: "waits for a person"}
    found = run._diagnose({0: waits_in("all_reduce"), 1: RankStatus("", "b.py:2 in g")})
    assert found is not None
    assert "waits for a person" in found.sentence


def test_a_case_that_stands_still_is_aborted_once() -> None:
    run = Steps()
    waits = [waits_in(op, case="n=1") for op in ("all_reduce", "barrier")]
    run.probe_twice(*waits)
    assert run.sent(AbortGroup) == [[AbortGroup("n=1")]] * 2
    assert run._pending() == {0, 1}
    run._probes.take(0, waits[0])
    run._probes.take(1, waits[1])
    run._probe({0, 1})
    assert run._pending() == {0, 1}
    run.probe_twice(*waits)
    assert run._pending() == set()


@pytest.mark.parametrize(
    ("cases", "is_over"),
    [
        (("n=1", "n=2"), True),
        ((f"{TRIAL}1", f"{TRIAL}2"), False),
        ((f"{TRIAL}1", "n=2"), True),
        (("", ""), True),
    ],
)
def test_ranks_in_different_cases_are_given_up(cases: tuple[str, str], is_over: bool) -> None:
    run = Steps()
    run.probe_twice(
        *(waits_in(op, case=case) for op, case in zip(("all_reduce", "barrier"), cases, strict=True))
    )
    assert (run._pending() == set()) == is_over
    assert run.sent(AbortGroup) == [[], []]


def test_what_waits_for_a_person_begins_without_a_suspicion() -> None:
    run = Steps()
    found = run._diagnose({0: waits_in("all_reduce"), 1: waits_in("barrier")})
    run._standstill.confirm(found)
    run._probes.answers[0] = waits_in("all_reduce")
    run._probes.due = 0.0
    run.paused = {1}
    run.clock.deadline = 0.0
    run.clock.begin_grace()
    run._end_what_is_over({1})
    assert run.clock.grace == math.inf
    assert not run._probes.answers
    assert run._probes.due > 0.0
    assert not run._standstill.confirm(found)
    assert run._pending() == {0, 1}
    run._end_what_is_over({0})
    assert run._pending() == {1}
