"""A rank among others: its votes, its cases, its groups, and what it does at the word of the controller."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from lockstep.exceptions import PeerFailed
from lockstep.protocol import REBUILT, AbortGroup, Agreed, Close, Interrupt, Part, Probe, RunItem, Vote
from lockstep.rank import process as module
from lockstep.rank.process import ABORT_AFTER, Rank
from lockstep.rank.status import Activity

SPEC: Any = SimpleNamespace(rank=1, seed=7, session=SimpleNamespace(cwd="/here"))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The parts of a rank, which note their calls in one list."""
    parts = Mock()
    names = ("DefaultGroup", "RankWorld", "Forks", "Wire", "StatusReader", "Rendezvous", "RankState")
    for name in (*names, "open_lasting_pipe", "seed_everything"):
        monkeypatch.setattr(module, name, getattr(parts, name))
    for name in ("group", "wire", "hook", "status"):
        setattr(parts, name, Mock())
    parts.status.activity = Activity()
    parts.DefaultGroup.return_value, parts.Wire.return_value = parts.group, parts.wire
    parts.StatusReader.return_value = parts.status
    return parts


@pytest.fixture
def rank(parts: Mock) -> Rank:
    rank = Rank(SPEC, parts.connection)
    rank.hook = parts.hook
    parts.reset_mock()
    return rank


def votes(*outcomes: str) -> Agreed:
    return Agreed(tuple(Vote(f"case of {outcome}", outcome) for outcome in outcomes))


def test_a_rank_answers_before_it_joins_its_group(parts: Mock) -> None:
    rank = Rank(SPEC, parts.connection)
    activity = parts.StatusReader.call_args.args[0]
    assert parts.mock_calls == [
        call.DefaultGroup(SPEC),
        call.RankWorld(SPEC, parts.group.device, rank.regroup),
        call.Forks(rank.world, rank._detach),
        call.Wire(parts.connection, 1, rank.forks.end_child),
        call.StatusReader(activity, parts.group, "/here"),
    ]
    assert isinstance(activity, Activity)
    assert (rank.dead, rank.left_behind) == (set(), set())
    rank.adopt_state(parts.state)
    parts.reset_mock()
    rank.join()
    assert parts.mock_calls == [
        call.wire.listen(rank._handle),
        call.group.join(),
        call.open_lasting_pipe(),
        call.Rendezvous(SPEC, parts.status.activity, parts.group.stores),
        call.Rendezvous().install(),
    ]


def test_a_fork_leaves_the_wire_and_the_group_to_the_rank(rank: Rank, parts: Mock) -> None:
    rank._detach()
    assert parts.mock_calls == [call.wire.leave_to_rank(), call.group.detach()]


@pytest.mark.parametrize(
    ("case", "meets_in"),
    [("world.rebuild()", "world.rebuild"), ("a=1", "a=1"), ("", "a new process group")],
)
def test_a_rank_votes_and_waits_for_the_votes_of_all(
    rank: Rank, parts: Mock, case: str, meets_in: str
) -> None:
    activity, vote = rank.status.activity, Vote(case, "passed")
    seen: list[tuple[str, str]] = []

    def answer(*_: float) -> Agreed:
        seen.append((activity.state, activity.meets_in))
        return votes("passed", "died", "ended")

    parts.wire.next_answer.side_effect = answer
    rank.dead = {5}
    assert [each.outcome for each in rank.agree(vote)] == ["passed", "ended"]
    assert rank.meet(vote) == votes("passed", "died", "ended")
    assert parts.mock_calls == [call.wire.send(vote), call.wire.next_answer()] * 2
    assert seen == [("votes", meets_in)] * 2
    assert (activity.state, rank.dead) == ("runs", {1, 5})


def test_a_rank_that_waits_for_too_long_frees_those_that_wait_for_it(rank: Rank, parts: Mock) -> None:
    vote = Vote("a=1", "failed")
    parts.wire.next_answer.side_effect = [votes("failed"), None, votes("failed")]
    rank.status.activity.abortable = "a=1"
    rank.agree(vote, 2.5)
    assert parts.mock_calls == [call.wire.send(vote), call.wire.next_answer(2.5)]
    assert rank.status.activity.abortable == "a=1"
    parts.reset_mock()
    rank.agree(vote, 2.5)
    assert parts.mock_calls == [
        call.wire.send(vote),
        call.wire.next_answer(2.5),
        call.group.abort(),
        call.wire.next_answer(),
    ]
    assert rank.status.activity.abortable == ""


def test_each_case_begins_with_the_seed_of_the_world(rank: Rank, parts: Mock) -> None:
    activity = rank.status.activity
    rank.begin_case("a=1", "subtest 2 of 3")
    assert (activity.case, activity.abortable, activity.count) == ("a=1", "a=1", "subtest 2 of 3")
    assert parts.mock_calls == [
        call.group.ended.begin_case(),
        call.seed_everything(7, parts.group.device),
    ]
    rank.end_case()
    assert (activity.case, activity.abortable, activity.count) == ("", "", "")
    rank.begin_case("a=2")
    assert activity.count == ""


def test_ranks_meet_in_a_new_group_after_a_failed_case(rank: Rank, parts: Mock) -> None:
    rank.status.activity.case = rank.status.activity.abortable = "a=1"
    rank.dead, rank.left_behind = {2}, {2, 3}
    parts.wire.next_answer.return_value = votes("met")
    rank.repair()
    assert parts.mock_calls == [
        call.group.repair("a=1"),
        call.hook.pytest_ranks_regrouped(),
        call.wire.send(Vote("a=1", "met")),
        call.wire.next_answer(),
    ]
    assert rank.status.activity.abortable == ""
    rank.dead = {4, 2, 0}
    with pytest.raises(
        RuntimeError, match=r"\Arank 0, 4 died, as the test expects, and the world was not reb"
    ):
        rank.repair()


def test_ranks_that_are_left_meet_in_a_new_group(rank: Rank, parts: Mock) -> None:
    parts.wire.next_answer.side_effect = [votes("met", "died", "met"), votes("rebuilt", "died", "rebuilt")]
    parts.RankState.capture.return_value = "before"
    rank.adopt_state = parts.adopt_state
    rank.status.activity.abortable = "a=1"
    assert rank.regroup() == (0, 2)
    where = "world.rebuild()"
    assert parts.mock_calls == [
        call.wire.send(Vote(where, "met", inside=True)),
        call.wire.next_answer(ABORT_AFTER),
        call.RankState.capture(),
        call.group.regroup((0, 2)),
        call.hook.pytest_ranks_regrouped(),
        call.wire.send(Vote(where, REBUILT, inside=True)),
        call.wire.next_answer(),
        call.adopt_state("before"),
    ]
    assert (rank.dead, rank.left_behind, rank.status.activity.abortable) == ({1}, {1}, "")


@pytest.mark.parametrize(
    ("outcomes", "kind", "why"),
    [
        (("failed", "met", "ended", "failed"), PeerFailed, "this case failed on another rank: rank 0, 3"),
        (
            ("met", "ended", "died", "passed"),
            RuntimeError,
            "world.rebuild(): all ranks that are left must call it; rank 1 has ended the test, or died, "
            "rank 3 is at case of passed",
        ),
    ],
)
def test_a_world_is_not_rebuilt_unless_all_ranks_that_are_left_call_it(
    rank: Rank, parts: Mock, outcomes: tuple[str, ...], kind: type[Exception], why: str
) -> None:
    parts.wire.next_answer.return_value = votes(*outcomes)
    with pytest.raises(kind) as refused:
        rank.regroup()
    assert str(refused.value) == why
    assert (parts.group.mock_calls, rank.left_behind) == ([], set())


def test_a_rank_does_as_the_controller_says(rank: Rank, parts: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    probe, part = Probe(full=True), Part("feature", 1)
    rank._handle(probe)
    rank._handle(part)
    assert parts.mock_calls == [
        call.status.answer(probe),
        call.wire.send(parts.status.answer.return_value),
        call.hook.pytest_ranks_part(part=part),
    ]
    parts.reset_mock()
    rank.status.activity.abortable = "a=1"
    for case in ("a=2", "a=1"):
        rank._handle(AbortGroup(case))
        assert parts.mock_calls == ([call.group.abort()] if case == "a=1" else [])
    parts.reset_mock()
    killed: list[tuple[object, ...]] = []
    monkeypatch.setattr(module.signal, "pthread_kill", lambda *given: killed.append(given))
    rank._handle(Interrupt())
    assert parts.mock_calls == [call.group.abort()]
    assert killed == [(threading.main_thread().ident, signal.SIGINT)]
    for message in (Close(), votes("met")):
        rank._handle(message)
    assert (len(parts.mock_calls), rank.status.activity.state) == (1, "idle")
    rank._handle(object.__new__(RunItem))
    assert rank.status.activity.state == "runs"
