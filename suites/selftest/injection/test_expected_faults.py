"""The controller's side of `faults.expect`: what counts as expected, who is ended, and what reports say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.injection import plugin
from lockstep.features.injection.expected_faults import SETTLES_WITHIN, ExpectedFaults
from lockstep.features.injection.messages import (
    FEATURE,
    EndOfBlock,
    Expects,
    FaultHit,
    Happened,
    LeavesByError,
    NewExample,
)
from lockstep.protocol import REBUILT, Part, Vote
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome

KILLED = Died(-9, "", 7.0)
KILL = "died: SIGKILL"
END = Vote("x", "ran through", more=EndOfBlock(3.0))
DEAD = Vote("", "died")


class Running:
    """A run of an item on three ranks, of which some are inside of `faults.expect`."""

    def __init__(self, *inside: int, text: str = KILL, within: float = 5.0) -> None:
        self.ranks = tuple(RankOutcome(rank) for rank in range(3))
        self.sent: list[tuple[int, Part]] = []
        self.run: Any = SimpleNamespace(outcomes=self.ranks, send=self._send, parts={})
        self.expected = ExpectedFaults(self.run)
        self.enter(*inside, text=text, within=within)

    def _send(self, rank: int, part: Part) -> None:
        self.sent.append((rank, part))

    def enter(self, *ranks: int, text: str = KILL, within: float = 5.0) -> None:
        for rank in ranks:
            self.expected.handle(rank, Expects(text, within))

    def kill(self, rank: int) -> str | None:
        self.ranks[rank].fate = KILLED
        return self.expected.note_death(rank, KILLED)

    def remarks(self, **given: Any) -> list[str]:
        return self.expected.remarks(ItemOutcome(self.ranks, 1.0, False, 1.0, **given))

    def with_groups(self, has_group: bool = True) -> None:
        for rank in self.ranks:
            rank.spec = SimpleNamespace(key=SimpleNamespace(has_group=has_group))  # type: ignore[assignment]


def lost(rank: int) -> Part:
    return Part(FEATURE, rank)


def test_a_death_inside_is_excused_and_the_others_that_run_hear_of_it() -> None:
    running = Running(0, 1, 2)
    running.ranks[2].vote = END
    assert running.kill(1) == "as the test expects"
    assert running.sent == [(0, lost(1))]
    assert running.ranks[1].fate == KILLED
    gone = Running(0, 1, 2)
    gone.ranks[2].fate = KILLED
    gone.expected.handle(1, LeavesByError())
    assert gone.sent == [(0, lost(1))]


@pytest.mark.parametrize("running", [Running(0, 2), Running(0, 1, 2, text="died: SIGTERM")])
def test_a_death_that_its_rank_did_not_expect_is_no_excuse(running: Running) -> None:
    assert running.kill(1) is None
    assert running.sent == []


def test_a_rank_that_enters_late_hears_of_those_that_were_lost_before() -> None:
    running = Running(1)
    running.kill(1)
    running.sent.clear()
    running.enter(0)
    assert running.sent == [(0, lost(1))]
    votes = [Vote("", REBUILT), DEAD, Vote("", REBUILT)]
    assert running.expected.count_votes([*votes[:2], Vote("", "passed")]) == ()
    running.enter(2)
    assert running.sent[1:] == [(2, lost(1))]
    assert running.expected.count_votes([*votes[:2], Vote("", "ended")]) == ()
    running.enter(0)
    assert running.sent[2:] == []


def test_the_end_of_a_block_has_the_deaths_and_failures_inside_of_it() -> None:
    running = Running(0, 1, 2)
    running.expected.handle(1, FaultHit("rank 1 is killed", 5.0))
    running.expected.handle(1, FaultHit("rank 1 is killed again", 6.0))
    running.kill(1)
    failed = Vote("x", "failed", "ValueError: x", EndOfBlock(4.0))
    happened = running.expected.count_votes([END, DEAD, failed])
    assert happened == (
        Happened(1, "rank 1 of 3 died: SIGKILL", 6.0),
        Happened(2, "rank 2 of 3 failed: ValueError: x", 4.0),
    )
    assert running.expected.count_votes([END, DEAD, failed]) == ()
    assert running.remarks() == [
        "injected by the test: rank 1 is killed",
        "injected by the test: rank 1 is killed again",
    ]


def test_a_death_that_no_fault_caused_happened_as_it_was_noticed() -> None:
    running = Running(0, 1, 2)
    running.kill(1)
    assert running.expected.count_votes([END, DEAD, END]) == (Happened(1, "rank 1 of 3 died: SIGKILL", 7.0),)


def test_a_block_ends_with_those_inside_of_it_and_no_other() -> None:
    running = Running(0, 1, 2, text="outer")
    running.enter(0, 2, text="inner")
    running.kill(1)
    assert running.expected.count_votes([END, DEAD, END]) == ()
    assert running.remarks() == [
        'expected by the test, and not seen: "inner"',
        'expected by the test, and not seen: "outer"',
    ]
    (happened,) = running.expected.count_votes([END, DEAD, END])
    assert happened.rank == 1
    running.enter(0, 2)
    assert running.expected.count_votes([END, DEAD, END]) == ()
    assert running.expected.count_votes([Vote("", "passed"), DEAD, Vote("", "passed")]) == ()


def test_a_block_that_only_one_rank_leaves_is_over_for_it_alone() -> None:
    running = Running(0, 1)
    running.kill(1)
    (happened,) = running.expected.count_votes([END, DEAD, Vote("", "ended")])
    assert happened.rank == 1


def test_the_innermost_block_that_any_rank_leaves_is_the_one_that_ends() -> None:
    running = Running(0, 1, 2)
    running.enter(0)
    running.kill(1)
    assert running.expected.count_votes([END, DEAD, END]) == ()


def test_the_loss_of_others_is_noted_of_the_rank_that_goes_on() -> None:
    running = Running(0, 1, 2)
    running.kill(1)
    running.expected.count_votes([Vote("x", "lost others", more=EndOfBlock(9.0)), DEAD, END])
    assert [each.lost_others for each in running.ranks] == [[9.0], [], []]


def test_what_was_expected_and_seen_is_not_called_unseen() -> None:
    running = Running(0, 1, 2)
    running.kill(1)
    assert running.remarks() == []
    running.expected.count_votes([END, DEAD, END])
    assert running.remarks() == []
    running.with_groups()
    assert running.remarks() == ["no world.rebuild() since the expected fault: groups of before do not work"]
    running.with_groups(has_group=False)
    assert running.remarks() == []
    running.with_groups()
    running.ranks[2].host = "b"
    assert running.remarks() == []


def test_what_was_expected_and_not_seen_is_said_once_in_order() -> None:
    running = Running(0, 2)
    running.with_groups()
    running.expected.count_votes([END, Vote("", "ended"), END])
    running.enter(0, 1, 2, text="rank 1 of 3")
    running.enter(0, text="other")
    running.expected.handle(2, LeavesByError())
    assert running.remarks() == [
        'expected by the test, and not seen: "died: SIGKILL"',
        'expected by the test, and not seen: "rank 1 of 3"',
        'expected by the test, and not seen: "other"',
    ]


def test_ranks_that_died_outside_of_a_block_are_named() -> None:
    running = Running(0)
    assert (running.kill(1), running.kill(2)) == (None, None)
    assert running.remarks() == [
        'expected by the test, and not seen: "died: SIGKILL"; ranks 1, 2 died outside of the block'
    ]
    other = Running(0, text="SIGTERM")
    other.kill(1)
    assert other.remarks() == ['expected by the test, and not seen: "SIGTERM"']


def test_the_latest_faults_of_all_ranks_are_listed_in_order_of_time() -> None:
    running = Running()
    for at, rank in ((3.0, 0), (1.0, 1), (2.0, 2), (4.0, 0), (5.0, 1)):
        running.expected.handle(rank, FaultHit(f"at {at:.0f}", at))
    assert running.remarks() == [f"injected by the test: at {at}" for at in (1, 2, 3, 4, 5)]
    running.expected.handle(2, FaultHit("at 6", 6.0))
    assert running.remarks() == [
        "injected by the test before: 1 faults more",
        *(f"injected by the test: at {at}" for at in (2, 3, 4, 5, 6)),
    ]
    running.expected.handle(0, NewExample())
    assert running.remarks() == [f"injected by the test: at {at}" for at in (1, 2, 5, 6)]


def standstill(is_hopeless: bool, *blame: int) -> Diagnosis:
    return Diagnosis("rank 1 hangs", frozenset(blame), is_hopeless)


def test_ranks_whose_standstill_is_expected_are_ended() -> None:
    running = Running(0, 1, 2, text="hangs")
    pending = {0, 1, 2}
    assert running.expected.ranks_to_end(standstill(True, 1), pending) == {1}
    assert running.expected.note_death(1, KILLED) == "as the test expects"
    assert isinstance(running.ranks[1].fate, Died)
    assert running.ranks[1].fate.stood_still
    (happened,) = running.expected.count_votes([END, DEAD, END])
    assert happened.text == "rank 1 hangs"


def test_a_standstill_with_hope_lasts_as_long_as_the_test_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("lockstep.features.injection.expected_faults.time.monotonic", lambda: now)
    running, pending = Running(0, 1, 2, text="hangs", within=5.0), {0, 1, 2}
    now = 104.0
    assert running.expected.ranks_to_end(standstill(False, 1), pending) is None
    running.expected.handle(1, FaultHit("", 0.0))
    now = 108.0
    assert running.expected.ranks_to_end(standstill(False, 1), pending) is None
    now = 109.0
    assert running.expected.ranks_to_end(standstill(False, 1), pending) == {1}


@pytest.mark.parametrize(
    ("running", "blame", "pending"),
    [
        (Running(0, 1, 2, text="other"), (1,), {0, 1, 2}),
        (Running(0, 2, text="hangs"), (1,), {0, 1, 2}),
        (Running(0, 1, 2, text="hangs"), (), {0, 1, 2}),
        (Running(0, 1, 2, text="hangs"), (1,), {0, 2}),
        (Running(0, 1, 2, text="hangs"), (1,), {1}),
    ],
    ids=["words", "outside", "no blame", "over", "all"],
)
def test_a_standstill_that_is_not_expected_is_judged_as_any_other(
    running: Running, blame: tuple[int, ...], pending: set[int]
) -> None:
    assert running.expected.ranks_to_end(standstill(True, *blame), pending) is None


def test_ranks_that_may_still_wait_for_one_that_has_gone_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("lockstep.features.injection.expected_faults.time.monotonic", lambda: now)
    running = Running(0, 1, 2)
    running.kill(1)
    now += SETTLES_WITHIN - 0.5
    assert running.expected.ranks_to_end(standstill(True, 0), {0, 2}) == set()
    now += 0.5
    assert running.expected.ranks_to_end(standstill(True, 0), {0, 2}) is None


def test_only_a_run_that_sends_or_loses_something_has_expectations() -> None:
    running = Running()
    run, parts = running.run, dict[str, Any]()
    plugin.pytest_ranks_message(run, 0, Part("other", Expects(KILL, 1.0)))
    assert plugin.pytest_ranks_standstill(run, standstill(True, 1), {0, 1}) is None
    plugin.pytest_ranks_agreed(run, [END] * 3, parts)
    outcome = ItemOutcome(running.ranks, 1.0, False, 1.0, parts=run.parts)
    assert (run.parts, parts, plugin.pytest_ranks_remarks(SimpleNamespace(outcome=outcome))) == ({}, {}, ())  # type: ignore[arg-type]
    for rank in (0, 1, 2):
        plugin.pytest_ranks_message(run, rank, Part(FEATURE, Expects("hangs", 1.0)))
    assert plugin.pytest_ranks_standstill(run, standstill(True, 1), {0, 1}) == {1}
    assert plugin.pytest_ranks_died(run, 1, KILLED) == "as the test expects"
    plugin.pytest_ranks_message(run, 0, Part(FEATURE, FaultHit("x", 1.0)))
    assert plugin.pytest_ranks_remarks(SimpleNamespace(outcome=outcome)) == ["injected by the test: x"]  # type: ignore[arg-type]
    plugin.pytest_ranks_agreed(run, [END, DEAD, END], parts)
    assert parts == {FEATURE: (Happened(1, "rank 1 hangs", 7.0),)}
