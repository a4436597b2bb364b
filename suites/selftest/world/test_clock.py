"""The time of an item: its deadline, its grace, and the probes that are due."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import Collecting, Probe, Progress, RankStatus, Reported
from lockstep.world.clock import GRACE, MAX_GRACE, Clock
from lockstep.world.outcome import Stuck
from lockstep.world.standstill import PROBE_EVERY, Probes
from suites.selftest.world.steps import FAILED, FINISHED, Steps, report, waits_in


def test_a_failure_of_one_rank_limits_the_time_of_the_others() -> None:
    run = Steps()
    run._end_what_is_over({0, 1})
    assert run.clock.grace == math.inf
    run.take(0, FAILED)
    run.may_pause = {1}
    run._end_what_is_over({0, 1})
    assert run.clock.grace == math.inf
    run.may_pause = {0}
    run._end_what_is_over({0, 1})
    assert run.clock.grace < math.inf
    xpassed = Steps()
    xpassed.take(0, Reported(report("failed", longrepr="[XPASS(strict)] it")))
    xpassed._end_what_is_over({0, 1})
    assert xpassed.clock.grace == math.inf


@pytest.fixture
def clock_at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_clock_has_the_time_of_an_item_of_imports_and_of_grace(clock_at: list[float]) -> None:
    clock_at[0] = 10.0
    clock = Clock(5.0)
    assert (clock.timeout, clock.begun, clock.deadline, clock.grace) == (5.0, 10.0, 15.0, math.inf)
    assert not clock.is_last_grace()
    clock_at[0] = 12.0
    clock.begin_import(1, "b.py")
    clock.begin_import(0, "a.py")
    assert (clock.importing, clock.deadline) == ({1: "b.py", 0: "a.py"}, 72.0)
    clock_at[0] = 14.0
    clock.end_import(1)
    assert (clock.importing, clock.deadline) == ({0: "a.py"}, 72.0)
    clock.end_import(0)
    clock.end_import(0)
    assert (clock.importing, clock.deadline) == ({}, 19.0)
    slow = Clock(100.0)
    slow.begin_import(0, "a.py")
    assert slow.deadline == 114.0
    clock_at[0] = 15.0
    slow.restart()
    assert slow.deadline == 115.0
    clock.begin_grace()
    assert clock.grace == 15.0 + GRACE
    clock_at[0] = 16.0
    clock.begin_grace()
    assert clock.grace == 15.0 + GRACE
    clock.prolong_grace()
    assert clock.grace == 16.0 + GRACE
    clock_at[0] = 15.0 + MAX_GRACE
    assert clock.is_last_grace()
    clock_at[0] -= 0.01
    assert not clock.is_last_grace()
    clock_at[0] += 0.02
    clock.end_grace()
    assert (clock.grace, clock.is_last_grace()) == (math.inf, False)


def test_a_rank_gets_one_probe_until_it_answers(clock_at: list[float]) -> None:
    clock_at[0] = 10.0
    sent: list[tuple[int, Any]] = []
    handles: list[Any] = [
        SimpleNamespace(rank=rank, send=lambda message, rank=rank: sent.append((rank, message)))
        for rank in range(2)
    ]
    probes = Probes(handles)
    assert probes.due == 10.0 + PROBE_EVERY
    clock_at[0] = 11.0
    probes.send(True)
    assert (probes.due, probes.unanswered) == (11.0 + PROBE_EVERY, {0, 1})
    probes.take(0, Progress())
    status = RankStatus("", "x")
    probes.take(1, status)
    assert (probes.unanswered, probes.answers) == (set(), {1: status})
    probes.unanswered = {0}
    probes.send(False)
    assert (probes.answers, probes.unanswered) == ({}, {0, 1})
    probe = Probe(names_place=True)
    assert sent == [(0, probe), (1, probe), (1, Probe())]


def test_at_the_deadline_all_that_run_are_given_up(clock_at: list[float]) -> None:
    run = Steps(3)
    run.take(1, Collecting("test_b.py"))
    run.clock.deadline = 60.0
    run.take(0, FINISHED)
    run.ranks[2].phases = 2
    clock_at[0] = 60.0
    run._end_what_is_over({1, 2})
    assert [isinstance(outcome.fate, Stuck) for outcome in run.outcomes] == [False, True, True]
    fates: list[Any] = [outcome.fate for outcome in run.outcomes[1:]]
    assert [fate.importing for fate in fates] == ["test_b.py", ""]
    assert [fate.phases_over for fate in fates] == [0, 2]


def test_a_probe_is_sent_when_it_is_due(clock_at: list[float]) -> None:
    run = Steps()
    due = run._probes.due
    clock_at[0] = due - 0.01
    run._end_what_is_over({0, 1})
    assert run.feature.calls == []
    clock_at[0] = due
    run._end_what_is_over({0, 1})
    assert run.feature.names() == ["probe"]


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(
    ("status", "phases", "is_over"),
    [
        (waits_in("all_reduce"), 0, (True, True)),
        (RankStatus("", "x", state="reports"), 0, (False, True)),
        (RankStatus("", "x", state="silent"), 0, (False, True)),
        (RankStatus("", "x"), 2, (False, False)),
        (RankStatus("", "x"), 1, (True, True)),
        (waits_in("all_reduce"), 2, (True, True)),
    ],
)
def test_grace_ends_ranks_that_wait_for_others(
    status: RankStatus, phases: int, is_over: tuple[bool, bool], is_last: bool, clock_at: list[float]
) -> None:
    run = Steps()
    run.take(0, FAILED)
    run._end_what_is_over({0, 1})
    run.ranks[1].answer, run.ranks[1].phases = status, phases
    clock_at[0] = run.clock.grace
    if is_last:
        clock_at[0] = run.clock._last_grace
    run._end_what_is_over({0, 1})
    assert run.asked == {1}
    assert isinstance(run.outcomes[1].fate, Stuck) == is_over[is_last]
    assert run.outcomes[0].fate is None
    assert (run.clock.grace > clock_at[0]) != is_over[is_last]
    assert run._probes.due > clock_at[0]
