"""Single steps of the controller's loop over one item: messages, votes, standstills, grace and deadline."""

from __future__ import annotations

import math
import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pluggy import PluginManager

from lockstep import feature_hooks
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import (
    REBUILT,
    TRIAL,
    AbortGroup,
    Agreed,
    Collecting,
    Finished,
    Issued,
    ItemStarted,
    Part,
    Preparation,
    Probe,
    Progress,
    RankStatus,
    Ready,
    Reported,
    RunItem,
    Vote,
    Warned,
)
from lockstep.world import item_run
from lockstep.world.clock import GRACE, MAX_GRACE, Clock
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, RankOutcome, Stuck
from lockstep.world.standstill import PROBE_EVERY, Probes

ORDER = RunItem("test_a.py::test_a[1]", "test_a.py", None, "")
FINISHED = Finished(True, 0, 0)
DEAD = Died(-9, "", 0.0)
WARNED = Warned("m", "UserWarning", "text", "file", 1)


def report(outcome: str, when: str = "call", **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "when": when, "$report_type": "TestReport", "longrepr": "", **more}


PASSED = [Reported(report("passed", when)) for when in ("setup", "call", "teardown")]
FAILED = Reported(report("failed"))


def waits_in(op: str, number: int = 1, **changes: Any) -> RankStatus:
    begun = Issued(DEFAULT_GROUP, (), number, op, ("float",), ((3,),), in_flight=True)
    return RankStatus("", f"a.py:{number} in f", issued=(begun,), **changes)


class Rank:
    """A handle on a rank that records what is sent to it, and answers a whole probe at once."""

    def __init__(self, rank: int) -> None:
        self.rank, self.host, self.spec, self.died = rank, "", None, None
        self.sent: list[Any] = []
        self.answer: Any = RankStatus("", "nowhere", state="silent")
        self.stopped = self.killed = False
        self.phases = 0
        self.signals: list[int] = []
        self.started = SimpleNamespace(kill=lambda: setattr(self, "killed", True), signal=self.signals.append)
        self.wire, self._own = multiprocessing.Pipe()

    def send_packed(self, message: Any) -> None:
        self.sent.append(pickle.loads(message))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def sources(self) -> tuple[Any, ...]:
        return ()

    def is_stopped(self) -> bool:
        return self.stopped

    def describe_silent(self) -> Any:
        return self.answer

    def phases_over(self) -> int:
        return self.phases

    def log(self) -> str:
        return f"log of {self.rank}"

    def output(self) -> Any:
        return SimpleNamespace(captured=lambda: (("stdout", f"printed by {self.rank}"),))


class Feature:
    """A feature that records the calls of its hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.excuse: str | None = None
        self.lost: set[int] | None = None
        self.votes: Sequence[Vote] = ()
        self.waits: dict[int, str] = {}

    @pytest.hookimpl
    def pytest_ranks_message(self, rank: int, part: Part) -> None:
        self.calls.append(("message", rank, part))

    @pytest.hookimpl
    def pytest_ranks_answer(self, rank: int, answer: RankStatus | Progress) -> None:
        self.calls.append(("answer", rank, answer))

    @pytest.hookimpl
    def pytest_ranks_probe(self, silent: set[int]) -> bool:
        self.calls.append(("probe", silent))
        return True

    @pytest.hookimpl
    def pytest_ranks_died(self, rank: int, death: Died) -> str | None:
        self.calls.append(("died", rank, death))
        return self.excuse

    @pytest.hookimpl
    def pytest_ranks_waits(self, statuses: Mapping[int, RankStatus]) -> dict[int, str]:
        return self.waits

    @pytest.hookimpl
    def pytest_ranks_standstill(self, found: Any, pending: set[int]) -> set[int] | None:
        self.calls.append(("standstill", set(pending)))
        return self.lost

    @pytest.hookimpl
    def pytest_ranks_agreed(self, votes: Sequence[Vote], parts: dict[str, Any]) -> None:
        self.votes = votes
        parts["mine"] = len(votes)

    @pytest.hookimpl
    def pytest_ranks_outcome(self, outcome: Any) -> None:
        self.calls.append(("outcome", outcome))

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class Steps(ItemRun):
    """A run whose steps a test calls, and whose ranks answer the request for their whole status at once."""

    def __init__(self, count: int = 2, timeout: float = 60.0, order: RunItem = ORDER) -> None:
        self.feature = Feature()
        manager = PluginManager("pytest")
        manager.add_hookspecs(feature_hooks)
        manager.register(self.feature)
        super().__init__(order, timeout, manager.hook)
        self.ranks = [Rank(number) for number in range(count)]
        self._handles: Any = self.ranks
        self._probes = Probes(self._handles)
        self.outcomes = [RankOutcome(number) for number in range(count)]

    def take(self, rank: int, *messages: Any) -> None:
        for message in messages:
            self._handle(rank, message)

    def request_statuses(self, ranks: set[int]) -> dict[int, RankStatus]:
        self.asked = set(ranks)
        return {rank: self.ranks[rank].answer for rank in ranks}

    def probe_twice(self, *answers: RankStatus) -> None:
        for _ in range(2):
            for rank, answer in enumerate(answers):
                self._probes.take(rank, answer)
            self._probe(self._pending())

    def sent(self, kind: type) -> list[list[Any]]:
        return [[each for each in rank.sent if isinstance(each, kind)] for rank in self.ranks]


# Messages


def test_messages_of_a_rank_are_kept_by_their_kind() -> None:
    run = Steps()
    part, progress, status = Part("mine", 1), Progress(), RankStatus("", "here")
    run._probes.unanswered = {0, 1}
    run.take(1, *PASSED[:2], WARNED, part, progress, Ready())
    assert run.outcomes[1].reports == [each.data for each in PASSED[:2]]
    assert run.outcomes[1].warnings == [WARNED]
    assert run.feature.calls == [("message", 1, part), ("answer", 1, progress)]
    assert run._probes.unanswered == {0}
    run.take(0, status)
    assert run._probes.answers == {0: status}
    assert run.feature.calls[2:] == [("answer", 0, status)]
    assert run.outcomes[0] == RankOutcome(0)


def test_the_first_status_of_a_failure_stays() -> None:
    run = Steps()
    first, second = RankStatus("", "first"), RankStatus("", "second")
    subtest = {"outcome": "failed", "$report_type": "SubtestReport"}
    run.take(0, Reported(subtest, RankStatus("", "of a subtest")))
    assert run.outcomes[0].status is None
    run.take(0, Reported(report("passed")), Reported(report("failed"), first))
    run.take(0, Reported(report("failed"), second), Finished(True, 0, 0, status=second))
    assert run.outcomes[0].status is first
    run.take(1, Finished(True, 0, 0, status=second))
    assert run.outcomes[1].status is second


def test_failed_cases_are_compared_between_ranks() -> None:
    run = Steps()
    subtest = {"outcome": "failed", "$report_type": "SubtestReport"}
    for rank, op in enumerate(("all_reduce", "barrier")):
        run.take(rank, Reported(subtest, waits_in(op, case="n=1")), Reported(subtest, waits_in(op)))
        run.take(rank, Reported(subtest))
        run.take(rank, FINISHED)
    outcome = run._outcome()
    assert outcome.diagnoses.keys() == {"n=1"}
    assert outcome.diagnosis is None


def test_a_death_keeps_what_the_rank_imported_and_its_excuse() -> None:
    run = Steps()
    run.feature.excuse = "as expected"
    run.take(0, Collecting("test_a.py"), DEAD)
    death = Died(-9, "", 0.0, importing="test_a.py")
    assert (run.outcomes[0].fate, run.outcomes[0].excuse) == (death, "as expected")
    assert run.feature.calls == [("died", 0, death)]
    run.take(1, Collecting("test_a.py"), ItemStarted(), FINISHED, DEAD)
    assert (run.outcomes[1].fate, run.outcomes[1].excuse) == (FINISHED, "")
    assert len(run.feature.calls) == 1
    run = Steps()
    run.take(0, DEAD)
    assert (run.outcomes[0].fate, run.outcomes[0].excuse) == (DEAD, "")


def test_where_all_ranks_have_died_no_death_is_excused() -> None:
    run = Steps()
    run.feature.excuse = "as expected"
    run.take(0, DEAD)
    run.take(1, FINISHED)
    assert run._outcome().ranks[0].excuse == "as expected"
    run.outcomes[1].fate = DEAD
    assert [rank.excuse for rank in run._outcome().ranks] == ["", ""]


# The outcome


def test_features_see_an_outcome_that_has_something_to_say() -> None:
    def seen(*messages: Any, order: RunItem = ORDER) -> bool:
        run = Steps(order=order)
        run.take(0, *PASSED, FINISHED)
        run.take(1, *messages)
        outcome = run._outcome()
        assert run.feature.calls in ([], [("outcome", outcome)])
        return bool(run.feature.calls)

    assert not seen(*PASSED, FINISHED)
    assert seen(FAILED, FINISHED)
    assert seen(*PASSED, Finished(False, 0, 0))
    assert seen(*PASSED, Finished(True, 0, 0, parts={"mine": 1}))
    assert seen(*PASSED, FINISHED, order=RunItem("test_a.py::test_a", "test_a.py", None, "", parts={"a": 1}))


def test_an_outcome_has_the_times_and_what_features_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    preparation = Preparation("stage", "first")
    run = Steps(timeout=5.0, order=RunItem("a.py::test[1]", "a.py", None, "", preparation=preparation))
    run.parts["mine"] = 1
    run.take(0, FINISHED)
    run.take(1, FINISHED)
    now[0] = 104.0
    outcome = run._outcome()
    assert run.label == "a.py::test::first[1]"
    assert (outcome.timeout, outcome.timed_out, outcome.seconds) == (5.0, False, 4.0)
    assert (outcome.parts, outcome.preparation) == ({"mine": 1}, preparation)
    assert [rank.rank for rank in outcome.ranks] == [0, 1]
    now[0] = 105.0
    assert run._outcome().timed_out


def test_a_mismatch_is_found_in_the_statuses_of_failures() -> None:
    run = Steps()
    assert run._find_diagnosis() is None
    run.take(0, Reported(report("failed"), waits_in("all_reduce")), FINISHED)
    run.take(1, Reported(report("failed"), waits_in("barrier")), FINISHED)
    found = run._find_diagnosis()
    assert found is not None
    assert found.sentence.startswith("mismatch")
    known = run._standstill.diagnosis = item_run.Diagnosis("known", frozenset(), False)
    assert run._find_diagnosis() is known


def test_after_an_expected_death_others_differ() -> None:
    run = Steps(3)
    run.feature.excuse = "as expected"
    run.take(0, DEAD)
    run.take(1, Reported(report("failed"), waits_in("all_reduce")), FINISHED)
    run.take(2, Reported(report("failed"), waits_in("barrier")), FINISHED)
    assert run.has_lost()
    assert run._size() == 3
    assert run._find_diagnosis() is None
    run.outcomes[0].has_left_world = True
    assert not run.has_lost()
    assert run._size() == 2
    assert run._find_diagnosis() is not None


def test_the_others_are_asked_about_a_rank_that_was_ended() -> None:
    run = Steps()
    run.ranks[1].answer = RankStatus("", "b.py:2 in g")
    run.outcomes[0].fate = Stuck(waits_in("all_reduce"), 0.0)
    run.outcomes[0].status = waits_in("all_reduce")
    found = run._find_diagnosis()
    assert run.asked == {1}
    assert found is not None
    assert "b.py:2 in g" in found.sentence
    run.asked.clear()
    run.take(1, FAILED)
    assert run._find_diagnosis() is None
    assert not run.asked


# Parts and signals


def test_a_signal_goes_to_a_process_that_lives() -> None:
    run = Steps()
    assert run.signal(1, 10)
    assert (run.ranks[0].signals, run.ranks[1].signals) == ([], [10])
    run.ranks[1].died = DEAD  # type: ignore[assignment]
    assert run.signal(1, 10) is False
    assert run.ranks[1].signals == [10]
    run.send(0, Part("mine", 1))
    assert (run.ranks[0].sent, run.ranks[1].sent) == ([Part("mine", 1)], [])


# Votes


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


# Standstill


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


# Grace and deadline


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


def test_a_loop_begins_with_the_order_and_ends_with_the_last_rank() -> None:
    run = Steps()
    seen: list[str] = []
    names = ("pytest_ranks_run_begins", "pytest_ranks_run_ended")
    plugin = SimpleNamespace(
        pytest_ranks_run_begins=pytest.hookimpl(lambda run: seen.append(f"{names[0]} {len(run.outcomes)}")),
        pytest_ranks_run_ended=pytest.hookimpl(lambda run: seen.append(names[1])),
    )
    manager = PluginManager("pytest")
    manager.add_hookspecs(feature_hooks)
    manager.register(plugin)
    run._hook = manager.hook
    for rank in run.ranks:
        rank.wire, own = multiprocessing.Pipe()
        own.send(FINISHED)
        rank.sources = lambda rank=rank: (rank.wire,)  # type: ignore[method-assign, misc]
        rank.read = lambda source: [source.recv()]  # type: ignore[attr-defined]
    del run._handles, run._probes
    run.outcomes = ()
    run.ranks[1].host = "far"
    run.clock.timeout = math.inf
    run.clock.restart()
    handles: Any = run.ranks
    outcome = ItemRun.run(run, handles)
    assert [rank.host for rank in outcome.ranks] == ["", "far"]
    assert seen == [f"{names[0]} 2", names[1]]
    assert run.sent(RunItem) == [[ORDER]] * 2
    assert [rank.fate for rank in outcome.ranks] == [FINISHED] * 2
