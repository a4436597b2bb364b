"""The controller's loop over one item, with ranks that send no further messages."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from pluggy import HookRelay, PluginManager

from lockstep import feature_hooks
from lockstep.exceptions import WorldError
from lockstep.flight_entries import DEFAULT_GROUP, FlightRecord
from lockstep.launch.processes import RankProcess
from lockstep.protocol import (
    AbortGroup,
    Collecting,
    Finished,
    Issued,
    Probe,
    RankStatus,
    Reported,
    RunItem,
    StartFailed,
)
from lockstep.world import clock, standstill
from lockstep.world.handle import RankHandle
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import ItemOutcome, RankOutcome, Stuck

ORDER = RunItem("test_a.py::test_a", "test_a.py", None, "")
FAILED = Reported({"outcome": "failed", "$report_type": "TestReport", "longrepr": ""})
PTRACE_ATTACH = 16


class SilentRank(RankHandle):
    """A rank that sends what its connection holds; it records what it is sent, and how often it is read."""

    def __init__(self, wire: Connection) -> None:
        self.rank, self.died = 0, None
        self.wire, self.host, self.spec = wire, "", None
        self.sent: list[Any] = []
        self.reads = 0

    def send_packed(self, message: Any) -> None:
        pass

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def sources(self) -> tuple[Any, ...]:
        self.reads += 1
        return (self.wire,)

    def read(self, source: Any) -> list[Any]:
        return list(self.wire.recv())

    def is_stopped(self) -> bool:
        return False

    def describe_silent(self) -> Any:
        return RankStatus("", "nowhere", state="silent")

    def phases_over(self) -> int:
        return 0

    def log(self) -> str:
        return ""

    def output(self) -> Any:
        return SimpleNamespace(captured=lambda: ())


def hooks() -> HookRelay:
    """Return the hooks of a controller without features."""
    manager = PluginManager("pytest")
    manager.add_hookspecs(feature_hooks)
    return manager.hook


def _run(rank: SilentRank, timeout: float) -> ItemOutcome:
    return ItemRun(ORDER, timeout, hooks()).run([rank])


class FreedRank(SilentRank):
    """A rank stopped in a subtest: after the abort it answers one probe, and ends the test with the next."""

    def __init__(self) -> None:
        ours, self.theirs = multiprocessing.Pipe()
        super().__init__(ours)
        self.answers = iter([RankStatus("", "a line", state="stopped", case="a=1")] * 3)

    def send(self, message: Any) -> None:
        super().send(message)
        if message == Probe():
            self.theirs.send((next(self.answers, Finished(True, 0, 0)),))


def test_an_answer_from_before_an_abort_does_not_end_the_test(monkeypatch: Any) -> None:
    monkeypatch.setattr(standstill, "PROBE_EVERY", 0.01)
    rank = FreedRank()
    outcome = _run(rank, 10)
    assert rank.sent.count(AbortGroup("a=1")) == 1
    assert outcome.finished() == [Finished(True, 0, 0)]


def test_a_rank_that_does_not_answer_gets_two_probes_only(monkeypatch: Any) -> None:
    monkeypatch.setattr(standstill, "PROBE_EVERY", 0.01)
    ours, _theirs = multiprocessing.Pipe()
    rank = SilentRank(ours)
    _run(rank, 0.5)
    assert rank.sent == [Probe(), Probe(full=True)]


def test_waiting_for_the_tear_down_of_a_failed_rank_is_not_busy() -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = SilentRank(ours)
    theirs.send((FAILED,))
    outcome = _run(rank, 1.5)
    assert outcome.timed_out
    assert rank.reads < 30


def test_a_rank_that_imports_for_ever_is_reported_with_its_file(monkeypatch: Any) -> None:
    monkeypatch.setattr(clock, "COLLECT_WITHIN", 0.5)
    ours, theirs = multiprocessing.Pipe()
    theirs.send((Collecting("test_endless.py"),))
    (rank,) = _run(SilentRank(ours), 0.1).ranks
    assert isinstance(rank.fate, Stuck)
    assert rank.fate.importing == "test_endless.py"


def test_a_rank_that_leaves_its_session_says_why() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send((StartFailed("pytest ended with status 4"),))
    with pytest.raises(WorldError, match="rank 0 ended its session: pytest ended with status 4"):
        _run(SilentRank(ours), 5)


def test_a_rank_that_a_debugger_has_attached_to_is_not_stopped() -> None:
    ours, _theirs = multiprocessing.Pipe()
    with subprocess.Popen(["sleep", "100"]) as process:
        of_popen: Any = SimpleNamespace(pid=process.pid, sentinel=0)
        started = RankProcess(of_popen, ours, "")
        spec: Any = SimpleNamespace(rank=0, path_of=lambda file: "")
        rank = RankHandle(spec, started)
        try:
            assert ctypes.CDLL(None).ptrace(PTRACE_ATTACH, process.pid, None, None) == 0
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            is_stopped = rank.is_stopped()
        finally:
            process.kill()
    assert not is_stopped


class LateRank(SilentRank):
    """A rank whose answer to an earlier probe comes when it is asked for its whole status."""

    def __init__(self, wire: Connection, own: Connection) -> None:
        super().__init__(wire)
        self.own = own

    def send(self, message: Any) -> None:
        if message == Probe(full=True):
            whole = RankStatus("all threads", "save()", record=FlightRecord((), {}, {}, 0, 0))
            self.own.send((RankStatus("", "earlier"),))
            self.own.send((whole,))


def test_a_rank_is_ended_with_its_whole_status() -> None:
    (rank,) = _run(LateRank(*multiprocessing.Pipe()), 0.1).ranks
    assert isinstance(rank.fate, Stuck)
    assert rank.fate.status.where == "save()"
    assert rank.fate.status.record == FlightRecord((), {}, {}, 0, 0)


class SlowRank(LateRank):
    """A rank that has no processor when it is asked for its status, and then reports its failure."""

    def send(self, message: Any) -> None:
        if message == Probe(full=True):
            self.own.send((FAILED, Finished(False, 0, 0)) if self.sent else ())
            self.sent.append(message)


def test_a_rank_that_is_slow_to_answer_after_a_failure_reports_its_own() -> None:
    ours, theirs = multiprocessing.Pipe()
    failed, slow = SilentRank(ours), SlowRank(*multiprocessing.Pipe())
    slow.rank = 1
    theirs.send((FAILED, Finished(False, 0, 0)))
    outcome = ItemRun(ORDER, 30, hooks()).run([failed, slow])
    assert outcome.ranks[1].fate == Finished(False, 0, 0)
    assert slow.sent == [Probe(full=True)] * 2


class AnsweringRank(LateRank):
    """A rank that answers each probe with the next of its answers, and then ends the test."""

    answers: Iterator[RankStatus]

    def send(self, message: Any) -> None:
        super(LateRank, self).send(message)
        self.own.send((next(self.answers, Finished(True, 0, 0)),))


def test_a_rank_that_has_not_begun_does_not_count_as_one_that_has_ended(monkeypatch: Any) -> None:
    """It may be busy with the end of the test before, or with the import of the file."""
    monkeypatch.setattr(standstill, "PROBE_EVERY", 0.05)
    begun = Issued(DEFAULT_GROUP, (), 1, "all_gather", ("float",), ((3,),), in_flight=True)
    waits, idle = RankStatus("", "", state="runs", issued=(begun,)), RankStatus("", "", state="idle")
    ranks = [AnsweringRank(*multiprocessing.Pipe()) for _ in range(2)]
    for rank, answer in zip(ranks, (waits, idle), strict=True):
        rank.answers = iter([answer] * 5)
    ranks[1].rank = 1
    outcome = ItemRun(ORDER, 30, hooks()).run(ranks)
    assert outcome.diagnosis is None
    assert [rank.fate for rank in outcome.ranks] == [Finished(True, 0, 0)] * 2


def test_no_rank_is_late_while_another_waits_for_a_person() -> None:
    run = ItemRun(ORDER, 60, hooks())
    run._handles, run._probes = [], standstill.Probes([])
    run.outcomes = [RankOutcome(0), RankOutcome(1)]
    run.clock.begin_grace()
    run.paused = {1}
    run._end_what_is_over({0, 1})
    assert run.clock.grace == math.inf
    run.clock.begin_grace()
    assert run.clock.grace < math.inf
