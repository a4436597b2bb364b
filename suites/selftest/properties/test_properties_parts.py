"""The parts that keep property tests on ranks in step, one by one."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import unittest
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
from hypothesis import Phase, core, settings, stateful
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_from_bytes
from hypothesis.errors import DeadlineExceeded, UnsatisfiedAssumption
from hypothesis.internal import scrutineer
from hypothesis.internal.conjecture import engine, providers
from hypothesis.internal.conjecture.data import ConjectureData, DataObserver, Status
from hypothesis.internal.escalation import InterestingOrigin
from hypothesis.strategies._internal.core import DataObject

from lockstep.exceptions import Diverged, PeerFailed
from lockstep.features.properties import examples
from lockstep.features.properties import hypothesis_internals as internals
from lockstep.features.properties.attempt import Attempt
from lockstep.features.properties.crashed import CrashGuard, RankCrashed
from lockstep.features.properties.crashed_examples import CrashSearch, find_smallest
from lockstep.features.properties.desync import END, EndedByOthers, OutOfStep, describe_draws
from lockstep.features.properties.examples import ABORT_AFTER, MAX_HUNG, Examples
from lockstep.features.properties.execution import (
    LockstepDatabase,
    SharedConstants,
    _Engine,
    _Execution,
    keep_in_step,
)
from lockstep.features.properties.hypothesis_internals import (
    call_after_draws,
    call_before_rules,
    constants_by_kind,
    constants_from,
    count_spans,
    exclude_from_explanations,
    explicit_seed,
    generated_seed,
    hold_constants,
    origin_of,
    release_constants,
    replace_engine_clock,
    replace_execution,
    respect_set_origins,
    restore_structure,
    set_origin,
    stop_shrinking,
    structure_of,
)
from lockstep.features.properties.messages import (
    CRASHED,
    FEATURE,
    SIZE,
    STATISTICS,
    CrashedExample,
    Drawn,
    ExampleResult,
    Origin,
    RunningExample,
    RunningExampleFile,
    Search,
    read_running_example,
)
from lockstep.features.properties.plugin import Searches
from lockstep.features.properties.rank import Properties
from lockstep.protocol import TRIAL, VICTIM_OF_A_TRIAL, Finished, RankStatus, RunItem, Vote
from lockstep.rank.world_fixture import RankWorld
from lockstep.recorders import ExecutionLog
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, Fate, ItemOutcome, RankOutcome, Stuck

KEY = b"key"
FINISHED = Finished(True, 0, 0)
DIED = Died(-9, "", 0.0)
ORDER = RunItem("id", "path", None, "tmp", parts={FEATURE: Search(entropy=5)})


def _stuck(state: str) -> Stuck:
    return Stuck(RankStatus("", "a line", state=state), 0.0)  # type: ignore[arg-type]


def _outcome(*fates: Fate, seconds: float = 1.0, blame: Iterable[int] = ()) -> ItemOutcome:
    ranks = tuple(RankOutcome(rank, fate=fate) for rank, fate in enumerate(fates))
    return ItemOutcome(ranks, 60.0, False, seconds, Diagnosis("", frozenset(blame), True))


def _example(choices: bytes, number: int = 1) -> RunningExample:
    return RunningExample(1, number, choices, True)


# What a rank notes of its example


def test_a_running_example_can_be_read_from_outside(tmp_path: Path) -> None:
    path = str(tmp_path / "running")
    note = RunningExampleFile(path)
    note.begin(2, 7)
    note.draw(b"ab")
    note.enter_body()
    note.draw(b"c")
    assert read_running_example(path) == note.now() == RunningExample(2, 7, b"abc", True)


def test_an_example_that_has_ended_is_read_as_none(tmp_path: Path) -> None:
    path = str(tmp_path / "running")
    note = RunningExampleFile(path)
    assert read_running_example(path) is None
    note.begin(1, 1)
    note.end()
    assert read_running_example(path) is None


def test_a_choice_that_does_not_fit_in_the_file_is_left_out(tmp_path: Path) -> None:
    path, before = str(tmp_path / "running"), len(os.listdir("/proc/self/fd"))
    note = RunningExampleFile(path)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_size == SIZE == 256 * 1024
    room = SIZE - 14
    note.begin(1, 1)
    for choice in (b"a" * (room - 2), b"bcd", b"ef", b"g"):
        note.draw(choice)
    read = read_running_example(path)
    assert read is not None
    assert len(read.choices) == len(note.now().choices) == room
    assert read.choices[-3:] == note.now().choices[-3:] == b"aef"


def test_examples_are_the_same_if_their_choices_are() -> None:
    assert _example(b"a", number=1).is_same(_example(b"a", number=2))
    assert not _example(b"a").is_same(_example(b"ab"))
    assert not _example(b"", number=1).is_same(_example(b"", number=2))
    assert not _example(b"a").is_same(RunningExample(1, 1, b"a", False))


# Which example has cost a world, and whether to look for a smaller one


def _ended_in(outcome: ItemOutcome, *examples: RunningExample | None) -> ItemOutcome:
    outcome.parts[FEATURE] = {rank: each for rank, each in enumerate(examples) if each is not None}
    return outcome


def _search_in(order: RunItem) -> Search:
    search: Search = order.parts[FEATURE]
    return search


def _crashed(outcome: ItemOutcome, *examples: RunningExample | None) -> tuple[CrashedExample, ...]:
    search = CrashSearch()
    return _search_in(search.order(ORDER)).crashed if search.add(_ended_in(outcome, *examples)) else ()


def test_a_rank_that_died_is_blamed_for_its_example() -> None:
    crashed = _crashed(_outcome(_stuck("votes"), DIED), _example(b"longer"), _example(b"a"))
    assert crashed == (CrashedExample(_example(b"a"), "rank 1 died: SIGKILL"),)


def test_a_rank_that_hangs_is_blamed_before_one_that_waits() -> None:
    crashed = _crashed(_outcome(_stuck("votes"), _stuck("runs")), _example(b"a"), _example(b"b"))
    assert crashed == (CrashedExample(_example(b"b"), "rank 1 hung in a line"),)


def test_a_rank_that_the_diagnosis_blames_is_blamed() -> None:
    crashed = _crashed(_outcome(_stuck("runs"), _stuck("runs"), blame=[1]), _example(b"a"), _example(b"b"))
    assert [each.example.choices for each in crashed] == [b"b"]


@pytest.mark.parametrize(
    ("fates", "examples"),
    [
        ((FINISHED, FINISHED), (None, None)),
        ((FINISHED, DIED), (None, None)),  # in a fixture, say
        ((FINISHED, _stuck("runs")), (None, _example(b"a"))),  # the other has ended the test
    ],
)
def test_no_example_is_blamed_for_a_crash_outside_of_it(
    fates: tuple[Fate, ...], examples: tuple[RunningExample | None, ...]
) -> None:
    assert _crashed(_outcome(*fates), *examples) == ()


def test_an_example_that_is_lost_twice_ends_the_search() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED), _example(b"a")))
    assert not search.add(_ended_in(_outcome(DIED), _example(b"a")))


def test_after_a_late_crash_the_test_runs_without_a_search() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED, seconds=31.0), _example(b"a")))
    assert not _search_in(search.order(ORDER)).continues
    assert not search.add(_ended_in(_outcome(DIED), _example(b"b")))


def test_a_search_without_crashes_looks_for_the_smallest_example() -> None:
    assert Search() == Search(0, (), continues=True)


def test_a_quick_loss_leaves_time_to_search_on() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED), _example(b"a")))
    found = _search_in(search.order(ORDER))
    assert (found.continues, found.entropy) == (True, 5)


def test_ranks_outside_of_an_example_are_not_blamed() -> None:
    crashed = _crashed(_outcome(_stuck("runs"), _stuck("runs")), None, _example(b"b"))
    assert [each.how for each in crashed] == ["rank 1 hung in a line"]


def test_the_crash_of_the_example_that_a_search_ends_with_is_reported() -> None:
    first, second = (_ended_in(_outcome(DIED), _example(choices)) for choices in (b"ab", b"a"))
    last = _outcome(FINISHED)
    last.ranks[0].reports.append({"outcome": "passed"})
    last.ranks[0].reports.append({"outcome": "failed", CRASHED: 1})
    runs = iter([second, last])
    orders: list[RunItem] = []

    def run(order: RunItem) -> ItemOutcome:
        orders.append(order)
        return next(runs)

    found = find_smallest(ORDER, first, run)
    assert found is not None
    assert found == replace(second, last_run=last)
    assert [len(_search_in(order).crashed) for order in orders] == [1, 2]
    assert find_smallest(ORDER, _outcome(FINISHED), run) is None
    without = _outcome(FINISHED)
    runs = iter([without])
    assert find_smallest(ORDER, first, run) is without


# What ranks read


def test_only_rank_0_uses_the_database_and_writes_at_the_end() -> None:
    theirs = [InMemoryExampleDatabase(), InMemoryExampleDatabase()]
    theirs[0].save(KEY, b"a")
    theirs[1].save(KEY, b"unseen")
    agree = [lambda _, read: read, lambda *_: [b"a"]]
    shared = [LockstepDatabase(theirs[rank], rank == 0, agree[rank]) for rank in (0, 1)]
    for database in shared:
        database.save(KEY, b"b")
        database.move(KEY, b"second", b"a")
        assert list(database.fetch(KEY)) == [b"b"]
    assert list(theirs[0].fetch(KEY)) == [b"a"]
    for database in shared:
        database.write()
    assert [sorted(each.fetch(KEY)) for each in theirs] == [[b"b"], [b"unseen"]]
    assert list(theirs[0].fetch(b"second")) == [b"a"]


class Box:
    """Something that can be referred to weakly."""


def test_an_attempt_keeps_drawn_numbers_and_no_drawn_objects(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    data = ConjectureData.for_choices([1, 4])
    boxes = st.sampled_from([Box(), Box()])
    attempt = Attempt(data, running, CrashGuard(running))
    attempt.run(lambda data, _: (data.draw(boxes), data.draw(st.integers(0, 9))), print)
    data.freeze()
    values = [span.recorded_value for span in data.spans]
    assert attempt.error is None
    assert 4 in values
    assert not any(isinstance(value, Box) for value in values)


def test_an_example_that_ended_a_world_fails_where_it_did(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    running.begin(1, 1)
    guard.check()
    assert not guard.is_expected
    crashed = tuple(
        CrashedExample(RunningExample(1, 1, each, False), f"how {each!r}") for each in (b"a", b"ab")
    )
    guard.begin_item(crashed)
    assert guard.is_expected
    guard.check()
    for choices, index in ((b"a", 0), (b"b", 1)):
        running.draw(choices)
        with pytest.raises(RankCrashed, match=f"how b'{'ab'[: index + 1]}'") as failure:
            guard.check()
        assert (failure.value.index, guard.has_met_last) == (index, index == 1)
    running.draw(b"c")
    guard.check()
    assert guard.has_met_last
    guard.begin_item(())
    assert not guard.has_met_last


def test_a_body_is_checked_as_it_begins(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    assert not guard.has_met_last
    body = guard.wrap_body(lambda *given, **named: (given, named))
    running.begin(1, 1)
    assert body(1, two=2) == ((1,), {"two": 2})
    assert running.now().is_in_body
    guard.begin_item((CrashedExample(RunningExample(1, 1, b"", True), "how"),))
    running.begin(1, 1)
    with pytest.raises(RankCrashed, match="how"):
        body()


def test_draws_are_checked_where_an_example_is_expected_to_fail(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    checks: list[int] = []
    guard.check = lambda: checks.append(1)  # type: ignore[method-assign]
    for crashed in ((), (CrashedExample(_example(b"a"), "how"),)):
        guard.begin_item(crashed)
        data = ConjectureData.for_choices([4, 5])
        Attempt(data, running, guard)
        data.draw_integer(0, 9)
        data.draw_integer(0, 9)
        assert len(checks) == 2 * len(crashed)


def test_the_draws_of_the_slowest_rank_and_the_best_targets_count(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    attempt = Attempt(ConjectureData.for_choices([1]), running, CrashGuard(running))
    results = [
        ExampleResult(b"", 1, {"a": 0.5, "b": 0.2}, {"loss": 1.0}),
        ExampleResult(b"", 1, {"a": 0.1, "b": 0.9}, {"loss": 2.0, "norm": 3.0}),
        ExampleResult(b"", 1, {"a": 0.6}, {}),
    ]
    attempt.share(results)
    assert attempt.data.draw_times == {"a": 0.1, "b": 0.9}
    assert attempt.data.target_observations == {"loss": 2.0, "norm": 3.0}


def _attempt(tmp_path: Path, *choices: Any, engine: Any = None) -> Attempt:
    running = RunningExampleFile(str(tmp_path / "running"))
    running.begin(1, 1)
    return Attempt(ConjectureData.for_choices(choices, observer=engine), running, CrashGuard(running))


def _raising(error: BaseException) -> Callable[..., object]:
    def run(*_: object) -> object:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "outcome", "reason"),
    [
        (lambda data, _: data.draw_integer(0, 9), "passed", ""),
        (lambda data, _: [data.draw_integer(0, 9) for _ in range(3)], "gave up on", "too much data drawn"),
        (lambda data, _: data.mark_invalid(), "rejected", ""),
        (_raising(UnsatisfiedAssumption()), "rejected", ""),
        (_raising(UnsatisfiedAssumption("odd")), "rejected", "odd"),
        (_raising(pytest.skip.Exception("no GPU")), "skipped", "no GPU"),
        (_raising(unittest.SkipTest("no file")), "skipped", "no file"),
    ],
)
def test_an_example_that_does_not_fail_ends_with_its_reason(
    tmp_path: Path, run: Callable[[ConjectureData, object], object], outcome: str, reason: str
) -> None:
    attempt = _attempt(tmp_path, 4)
    attempt.run(run, print)
    vote = attempt.vote("example 1", 1.5)
    result = ExampleResult.unpack(vote.more)
    assert (vote.case, vote.outcome, vote.reason, vote.renews_deadline) == (
        "example 1",
        outcome,
        reason,
        True,
    )
    assert (result.seconds, result.origin, result.lost_connection) == (1.5, None, False)
    assert attempt.result == (4 if outcome == "passed" else None)


@pytest.mark.parametrize(
    ("words", "lost"), [("no such value", False), ("[gloo] Connection closed by peer", True)]
)
def test_a_failing_example_is_identified_and_a_lost_connection_is_known(
    tmp_path: Path, words: str, lost: bool
) -> None:
    attempt = _attempt(tmp_path)
    attempt.run(_raising(RuntimeError(words)), print)
    vote = attempt.vote("example 1", 0.0)
    result = ExampleResult.unpack(vote.more)
    assert (vote.outcome, vote.reason, result.lost_connection) == ("failed", "", lost)
    assert result.origin is not None
    assert (result.origin.exception, result.origin.filename) == ("RuntimeError", __file__)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), pytest.exit.Exception("enough")])
def test_an_example_that_ends_the_run_does_so_at_once(tmp_path: Path, error: BaseException) -> None:
    attempt = _attempt(tmp_path)
    with pytest.raises(type(error)):
        attempt.run(_raising(error), print)
    assert attempt.error is None


def test_the_engine_sees_draws_and_their_end_only_when_they_are_handed_over(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    attempt = _attempt(tmp_path, 4, True, 0.5, engine=engine)

    def run(data: ConjectureData, _: object) -> None:
        data.draw_integer(0, 9)
        data.draw_boolean(forced=True)
        data.observer.kill_branch()
        data.draw_float(0.0, 1.0)

    attempt.run(run, print)
    attempt.data.freeze()
    assert engine.mock_calls == []
    read = read_running_example(str(tmp_path / "running"))
    assert read is not None
    assert choices_from_bytes(read.choices) == (4, True, 0.5)
    attempt.recorder.hand_over()
    names = ["draw_integer", "draw_boolean", "kill_branch", "draw_float", "conclude_test"]
    assert [name for name, _, _ in engine.mock_calls] == names
    integer, boolean, _, real, end = engine.mock_calls
    assert (integer.args, integer.kwargs["was_forced"], integer.kwargs["constraints"]["max_value"]) == (
        (4,),
        False,
        9,
    )
    assert (boolean.args, boolean.kwargs["was_forced"], real.args) == ((True,), True, (0.5,))
    assert end.args == (Status.VALID, None)
    assert attempt.data.observer is engine


def test_an_example_that_has_no_end_yet_is_handed_over_without_one(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    attempt = _attempt(tmp_path, 4, engine=engine)
    attempt.data.draw_integer(0, 9)
    attempt.recorder.hand_over()
    assert [name for name, _, _ in engine.mock_calls] == ["draw_integer"]


def test_draws_in_words_have_their_bounds_and_their_argument(tmp_path: Path) -> None:
    attempt = _attempt(tmp_path, 4, 0.5, 7, b"x" * 100)
    data = attempt.data
    data.draw(st.integers(0, 9), observe_as="generate:x")
    data.draw(st.floats(0, 1), observe_as="generate:y")
    data.observer.kill_branch()
    data.draw_integer(0, None)
    data.draw_bytes()
    found = attempt.recorder.describe()
    assert found[:3] == [
        Drawn("4 (integer of 0 to 9)", "x"),
        Drawn("0.5 (float)", "y"),
        Drawn("7 (integer)", ""),
    ]
    assert len(found) == 4
    assert len(found[3].value) < 100


def test_draws_are_the_same_if_values_bounds_and_structure_are(tmp_path: Path) -> None:
    def digest(draw: Callable[[ConjectureData], object]) -> bytes:
        attempt = _attempt(tmp_path, 4, 5)
        draw(attempt.data)
        return attempt.recorder.digest()

    def draw_in_span(data: ConjectureData) -> None:
        data.start_span(1)
        data.draw_integer(0, 9)
        data.stop_span()

    draws: list[Callable[[ConjectureData], object]] = [
        lambda data: data.draw_integer(0, 9),
        lambda data: data.draw_integer(0, 8),
        lambda data: data.draw_integer(0, None),
        lambda data: [data.draw_integer(0, 9), data.draw_integer(0, 9)],
        draw_in_span,
    ]
    found = [digest(draw) for draw in draws]
    assert found == [digest(draw) for draw in draws]
    assert len(set(found)) == len(draws)
    assert {len(each) for each in found} == {16}


def test_an_example_takes_over_the_draws_of_another_up_to_where_it_stopped(tmp_path: Path) -> None:
    engine = Mock(spec=DataObserver)
    of_other, mine = _attempt(tmp_path, 4), _attempt(tmp_path, 4, 5, engine=engine)
    of_other.data.draw_integer(0, 9)
    for _ in range(2):
        mine.data.draw_integer(0, 9)
    mine.data.freeze()
    mine.take_over(of_other.keep())
    assert (mine.recorder.events, mine.data.choices) == (of_other.recorder.events, (4,))
    assert mine.recorder.digest() == of_other.recorder.digest()
    mine.recorder.hand_over()
    assert [name for name, _, _ in engine.mock_calls] == ["draw_integer"]


class _OtherRank:
    """Votes as a rank 0 that has read only one constant."""

    def exchange(self, case: str, value: object) -> list[object]:
        if isinstance(value, dict):
            return [{kind: [5] if kind == "integers" else [] for kind in value}, value]
        return [b"another", value]


def _out_of_step(tmp_path: Path, answer: Callable[[Vote], Vote], act: Callable[[Examples], object]) -> str:
    """Return what rank 0 of 2 raises where rank 1 answers its votes so."""
    rank = Mock(agree=lambda vote, abort_after: (vote, answer(vote)))
    rank.spec.path_of.return_value, rank.spec.rank = str(tmp_path / "running"), 0
    with pytest.raises(OutOfStep) as raised:
        act(Examples(rank, records=False))
    return f"{raised.type.__name__}: {raised.value}"


def test_the_setting_in_which_ranks_differ_is_named(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return replace(vote, more={"test": "x", "seed": "7"} if isinstance(vote.more, dict) else "another")

    assert _out_of_step(tmp_path, answer, lambda each: each.begin_run("f", {"test": "x", "seed": "5"})) == (
        "OutOfStep: ranks begin [the property f] differently: rank 0 has the seed 5; rank 1 has the seed 7.\n"
        "Seed and settings must be the same on all ranks"
    )


def test_ranks_at_different_places_are_named(tmp_path: Path) -> None:
    assert _out_of_step(
        tmp_path, lambda vote: replace(vote, case="the property g"), lambda each: each.begin_run("f", {})
    ) == (
        "OutOfStep: ranks disagree on what comes next: rank 0 at [the property f]; rank 1 at [the property g]"
    )


@pytest.mark.parametrize("change", [{"outcome": "ended"}, {"case": END}], ids=["test", "property"])
def test_a_rank_that_has_ended_the_test_is_named(tmp_path: Path, change: dict[str, str]) -> None:
    assert _out_of_step(
        tmp_path, lambda vote: replace(vote, **change), lambda each: each.begin_run("f", {})
    ) == ("EndedByOthers: this example failed on another rank: rank 1 had already ended the test")


def test_a_property_may_end_after_another_rank_has_ended_it(tmp_path: Path) -> None:
    votes: list[Vote] = []

    def agree(vote: Vote, abort_after: float) -> tuple[Vote, ...]:
        votes.append(vote)
        return vote, replace(vote, outcome="ended")

    rank = Mock(agree=agree)
    rank.spec.path_of.return_value = str(tmp_path / "running")
    Examples(rank, records=False).end_run()
    assert [(vote.case, vote.outcome, vote.renews_deadline) for vote in votes] == [(END, "ended it", True)]


@pytest.fixture(autouse=True)
def _own_seeds() -> Iterator[None]:
    """Leave the seeds of other property tests in this process as they are."""
    before = core.threadlocal._hypothesis_global_random
    yield
    core.threadlocal._hypothesis_global_random = before


class _Peers:
    """Votes of two ranks, of which this process is one; the other answers each vote of this one."""

    def __init__(self, tmp_path: Path, answer: Callable[[Vote], Vote], *, rank: int = 0) -> None:
        self.votes: list[Vote] = []
        self.waits: list[float | None] = []
        self.path = str(tmp_path / "running")
        self.in_vote: list[RunningExample | None] = []

        def agree(vote: Vote, abort_after: float | None) -> tuple[Vote, ...]:
            self.votes.append(vote)
            self.waits.append(abort_after)
            self.in_vote.append(read_running_example(self.path))
            return (vote, answer(vote)) if rank == 0 else (answer(vote), vote)

        self.rank = Mock(agree=agree)
        self.rank.spec.path_of.return_value, self.rank.spec.rank = self.path, rank
        self.rank.group.is_aborted = False
        self.examples = Examples(self.rank, records=False)
        self.examples.begin_item(Search())

    def run(self, act: Callable[[ConjectureData], object], *choices: Any, engine: Any = None) -> object:
        self.data = ConjectureData.for_choices(choices, observer=engine)
        return self.examples.run(lambda data, _: act(data), self.data, print)


def _same(vote: Vote) -> Vote:
    return vote


def _with_result(vote: Vote, outcome: str, **changes: Any) -> Vote:
    """Return the vote of a rank in the same example with another outcome and result."""
    result = replace(ExampleResult.unpack(vote.more), **changes)
    return replace(vote, outcome=outcome, more=result.pack())


def _fail(_: ConjectureData) -> None:
    raise ValueError("wrong")


ORIGIN = Origin("all of it", "ValueError", "elsewhere.py", 3)


def _other_failed(vote: Vote) -> Vote:
    if not vote.case.startswith(TRIAL):
        return vote
    changes = {"origin": ORIGIN, "lost_connection": False, "seconds": MAX_HUNG * 2, "targets": {"loss": 2.0}}
    return _with_result(vote, "failed", **changes)


def test_an_example_that_passes_on_all_ranks_is_one_step_of_the_search(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return _with_result(vote, "passed", seconds=40.0, targets={"loss": 2.0})

    peers, engine = _Peers(tmp_path, answer, rank=1), Mock(spec=DataObserver)
    for _ in range(2):
        assert peers.run(lambda data: data.draw_integer(0, 9), 4, engine=engine) == 4
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1", f"{TRIAL}2"]
    assert peers.rank.begin_case.mock_calls == [call(f"{TRIAL}{each}", f"{TRIAL}{each}") for each in (1, 2)]
    assert [each.number for each in peers.in_vote if each is not None] == [1, 2]
    assert read_running_example(peers.path) is None
    assert (peers.waits, peers.examples.clock.monotonic()) == ([None, None], 40.0)
    assert peers.data.target_observations == {"loss": 2.0}
    assert engine.draw_integer.call_count == 2
    assert not peers.examples.must_stop()
    assert peers.rank.repair.mock_calls == []


def test_an_example_that_all_ranks_reject_is_rejected(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, _same)
    with pytest.raises(UnsatisfiedAssumption, match="odd"):
        peers.run(_raising(UnsatisfiedAssumption("odd")))
    assert peers.waits == [None]


@pytest.mark.parametrize(
    ("place", "act"), [(TRIAL, print), ("the draws", print), ("the end", _fail), ("what", _fail), ("", _fail)]
)
def test_frames_of_the_search_are_left_out_of_tracebacks(
    tmp_path: Path, place: str, act: Callable[[ConjectureData], None]
) -> None:
    def answer(vote: Vote) -> Vote:
        if place and vote.case.startswith(place):
            return replace(vote, case="another place")
        return _with_result(vote, "passed", choices=b"another") if vote.case == f"{TRIAL}1" else vote

    peers = _Peers(tmp_path, answer)
    peers.rank.hook.pytest_ranks_example.return_value = None
    body = peers.examples.wrap_body(act)
    with pytest.raises(OutOfStep if place else ValueError) as raised:
        peers.run(body)
    ours = [entry for entry in raised.traceback if Path(entry.path).parent.name == "properties"]
    ours = [entry for entry in ours if entry.path != Path(__file__)]
    assert ours
    assert [entry.name for entry in ours if not entry.ishidden(raised)] == []


def test_ranks_that_decide_differently_are_out_of_step(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, lambda vote: replace(vote, outcome="rejected", reason="odd"))
    with pytest.raises(OutOfStep, match=r"rank 0 passed it; rank 1 rejected it \(odd\)"):
        peers.run(print)


def test_ranks_that_draw_differently_are_out_of_step(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        if vote.case.startswith(TRIAL):
            return _with_result(vote, "passed", choices=b"another")
        return replace(vote, more=[Drawn("5 (integer of 0 to 9)", "")])

    peers = _Peers(tmp_path, answer)
    with pytest.raises(OutOfStep, match=r"rank 0 drew 4 \(integer of 0 to 9\); rank 1 drew 5 \(integer"):
        peers.run(lambda data: data.draw_integer(0, 9), 4)
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1", f"the draws of {TRIAL}1"]


def test_a_failure_on_this_rank_frees_the_others_and_is_raised(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, lambda vote: _with_result(vote, "passed") if vote.outcome == "failed" else vote)
    with pytest.raises(ValueError, match="wrong") as failure:
        peers.run(_fail)
    assert peers.waits == [ABORT_AFTER, None]
    assert peers.votes[1].case == f"the end of {TRIAL}1"
    assert peers.votes[1].renews_deadline
    assert peers.rank.repair.mock_calls == []
    assert vars(failure.value)["_lockstep_origin"].exc_type.__name__ == "ValueError"
    assert read_running_example(peers.path) is None


def test_a_failure_on_another_rank_fails_the_example_here_at_its_line(tmp_path: Path) -> None:
    peers, engine = _Peers(tmp_path, _other_failed), Mock(spec=DataObserver)
    with pytest.raises(PeerFailed) as failure:
        peers.run(lambda data: data.draw_integer(0, 9), 4, engine=engine)
    assert str(failure.value) == f"{VICTIM_OF_A_TRIAL}rank 1"
    origin = vars(failure.value)["_lockstep_origin"]
    assert (origin.exc_type.__name__, origin.filename, origin.lineno) == ("ValueError", "elsewhere.py", 3)
    assert engine.draw_integer.call_count == 1
    assert peers.data.target_observations == {"loss": 2.0}
    with pytest.raises(PeerFailed):
        peers.run(_raising(UnsatisfiedAssumption("odd")))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_connection_broke_is_not_the_culprit(tmp_path: Path, rank: int) -> None:
    peers = _Peers(tmp_path, _other_failed, rank=rank)
    with pytest.raises(RuntimeError, match="gloo") as failure:
        peers.run(_raising(RuntimeError("[gloo] Connection closed by peer")))
    assert vars(failure.value)["_lockstep_origin"].filename == "elsewhere.py"
    assert not peers.examples.must_stop()


def test_a_broken_connection_where_another_rank_left_early_is_out_of_step(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return replace(_with_result(vote, "skipped", origin=None, lost_connection=False), reason="no GPU")

    peers = _Peers(tmp_path, lambda vote: answer(vote) if vote.case == f"{TRIAL}1" else vote)
    with pytest.raises(OutOfStep, match=r"rank 0 failed it; rank 1 skipped it \(no GPU\)"):
        peers.run(_raising(RuntimeError("[gloo] Connection closed by peer")))


@pytest.mark.parametrize(("rank", "kept"), [(0, (5,)), (1, (4,))])
def test_all_ranks_take_the_draws_of_the_first_that_failed(
    tmp_path: Path, rank: int, kept: tuple[int, ...]
) -> None:
    (tmp_path / "other").mkdir()
    other = _attempt(tmp_path / "other", 5)
    other.data.draw_integer(0, 9)

    def answer(vote: Vote) -> Vote:
        if vote.case == f"{TRIAL}1":
            return _with_result(vote, "passed" if rank else "failed", choices=b"another", origin=ORIGIN)
        return replace(vote, more=other.keep()) if vote.case.startswith("what") else vote

    peers, engine = _Peers(tmp_path, answer, rank=rank), Mock(spec=DataObserver)

    def act(data: ConjectureData) -> None:
        data.draw_integer(0, 9)
        if rank:
            _fail(data)

    with pytest.raises(ValueError if rank else PeerFailed, match="wrong" if rank else "rank 1"):
        peers.run(act, 4, engine=engine)
    assert engine.draw_integer.call_args.args == kept
    handed = [vote.more is not None for vote in peers.votes if vote.case == f"what {TRIAL}1 has drawn"]
    assert handed == [bool(rank)]


@pytest.mark.parametrize(("here", "there"), [(True, True), (False, True), (True, False), (False, None)])
def test_a_group_that_a_failure_has_broken_is_made_again(
    tmp_path: Path, here: bool, there: bool | None
) -> None:
    def answer(vote: Vote) -> Vote:
        if vote.case != f"the end of {TRIAL}1":
            return vote
        _, collectives, groups = vote.more
        state = (False, collectives + 1, groups) if there is None else (there, collectives, groups)
        return replace(vote, more=state)

    peers = _Peers(tmp_path, answer)
    peers.rank.group.is_aborted = here
    tracers: list[object] = []
    peers.rank.repair = lambda: tracers.append(sys.gettrace())
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        with pytest.raises(ValueError, match="wrong"):
            peers.run(_fail)
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert tracers == [None]
    assert after is not None


def test_a_search_counts_the_time_of_examples_in_which_others_only_waited(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        if not vote.case.startswith(TRIAL):
            return vote
        return _with_result(vote, "passed", origin=None, lost_connection=False, seconds=MAX_HUNG + 1)

    peers = _Peers(tmp_path, answer, rank=1)
    with pytest.raises(RuntimeError):
        peers.run(_raising(RuntimeError("[gloo] Connection closed by peer")))
    assert peers.examples.must_stop()


def test_each_test_counts_its_examples_and_its_time_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = _Peers(tmp_path, _same)
    assert not Examples(peers.rank, records=False).is_active
    moments = iter([5.0, 7.0, 20.0, 23.0])
    monkeypatch.setattr(examples, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    drawn = []
    for _ in range(2):
        peers.examples.begin_item(Search(entropy=5))
        drawn.append(core.threadlocal._hypothesis_global_random.getrandbits(64))
        peers.run(print)
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1"] * 2
    assert [ExampleResult.unpack(vote.more).seconds for vote in peers.votes] == [2.0, 3.0]
    assert drawn == [random.Random(5).getrandbits(64)] * 2


def test_a_search_ends_once_examples_in_which_no_rank_went_on_took_too_long(tmp_path: Path) -> None:
    seconds = iter([15.0, MAX_HUNG, MAX_HUNG + 1])

    def answer(vote: Vote) -> Vote:
        if not vote.case.startswith(TRIAL):
            return vote
        return _with_result(vote, "failed", seconds=next(seconds))

    peers = _Peers(tmp_path, answer, rank=1)
    stopped = []
    for _ in range(3):
        with pytest.raises(RuntimeError):
            peers.run(_raising(RuntimeError("[gloo] Connection closed by peer")))
        stopped.append(peers.examples.must_stop())
    assert stopped == [False, False, True]
    peers.examples.begin_item(Search())
    assert not peers.examples.must_stop()
    assert peers.examples.clock.now == 0.0


@pytest.mark.parametrize(("continues", "has_met", "stops"), [(0, 1, True), (1, 1, False), (0, 0, False)])
def test_a_search_that_is_not_to_continue_ends_with_its_last_crash(
    tmp_path: Path, continues: int, has_met: int, stops: bool
) -> None:
    peers = _Peers(tmp_path, _same)
    peers.examples.seed = 7
    peers.examples.begin_item(Search(continues=bool(continues)))
    assert (peers.examples.is_active, peers.examples.seed) == (True, None)
    peers.examples.crash_guard.has_met_last = bool(has_met)
    assert peers.examples.must_stop() is stops


def test_ranks_begin_a_property_with_facts_in_any_order(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, _same)
    for facts in ({"test": "x", "seed": "5"}, {"seed": "5", "test": "x"}):
        peers.examples.begin_run("f", facts)
        for _ in range(2):
            peers.run(lambda data: data.draw_integer(0, 9), 4)
    begun = [vote for vote in peers.votes if vote.case == "the property f"]
    assert [vote.outcome for vote in begun] == ["exchanged", "exchanged"]
    assert begun[0].more == begun[1].more
    peers.examples.begin_run("f", {"test": "x", "seed": "6"})
    assert peers.votes[-1].more != begun[0].more
    assert [(each.run, each.number) for each in peers.in_vote if each is not None] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


def test_a_body_runs_in_the_context_of_other_features(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, _same)
    entered: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    for found in (None, context()):
        peers.rank.hook.pytest_ranks_example.return_value = found
        body = peers.examples.wrap_body(lambda *given, **named: entered.append("body") or (given, named))
        assert body(1, two=2) == ((1,), {"two": 2})
    assert entered == ["body", "in", "body", "out"]


def test_examples_are_recorded_where_a_rank_records(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, _same)
    assert isinstance(peers.examples.recorded(), contextlib.nullcontext)
    peers.rank.spec.session.cwd = str(tmp_path)
    assert isinstance(Examples(peers.rank, records=True).recorded(), ExecutionLog)


def test_the_crash_of_a_rank_in_step_is_not_run_again(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, _same)
    peers.examples.begin_item(Search(crashed=(CrashedExample(RunningExample(0, 1, b"", True), "how"),)))
    body = peers.examples.crash_guard.wrap_body(lambda: "never")
    with pytest.raises(RankCrashed):
        peers.run(lambda _: body())
    assert peers.votes[0].outcome == "failed"


def test_draws_in_bounds_that_read_alike_are_named_by_their_example() -> None:
    drawn = [[Drawn("0.5 (float)", "x")], [Drawn("0.5 (float)", "x")]]
    assert describe_draws("example 3", drawn).startswith("ranks drew with different bounds in example 3.\n")


def test_a_rank_that_drew_less_is_named() -> None:
    drawn = [[Drawn("1", "x"), Drawn("2", "")], [Drawn("1", "x")], [Drawn("1", "y"), Drawn("2", "y")]]
    assert describe_draws("example 3", drawn).startswith(
        "ranks drew different values in example 3: "
        "rank 0 drew 2; rank 1 drew nothing more; rank 2 drew 2 for y."
    )


def test_an_example_that_marks_itself_invalid_is_rejected_with_its_reason(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    attempt = Attempt(ConjectureData.for_choices([]), running, CrashGuard(running))
    attempt.run(lambda data, _: data.mark_invalid("no such number"), print)
    vote = attempt.vote("example 1", 0.0)
    assert (vote.outcome, vote.reason) == ("rejected", "no such number")


def test_all_ranks_draw_from_the_constants_of_rank_0() -> None:
    shared = SharedConstants(_OtherRank())  # type: ignore[arg-type]
    before = providers._get_local_constants
    shared.share()
    try:
        assert list(providers._get_local_constants()) == [5]
    finally:
        shared.release()
    assert providers._get_local_constants is before


def test_a_rank_picks_its_own_and_too_few_values_are_refused() -> None:
    session = SessionSpec((), "", (), (), {}, {}, captures=False)
    world = RankWorld(RankSpec(1, WorldKey(2, "gloo", "cpu"), session, 0, "", ""), torch.device("cpu"))
    assert world.pick(["a", "b", "c"]) == "b"
    with pytest.raises(ValueError, match=r"world.pick: 1 values for 2 ranks; draw at least world.size"):
        world.pick(["a"])


def test_an_unsupported_hypothesis_fails_property_tests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_in_step(self: Properties) -> None:
        raise AttributeError("module 'hypothesis.core' has no attribute 'State'")

    monkeypatch.setattr(Properties, "_keep_in_step", keep_in_step)
    rank: Any = None
    plain: Any = SimpleNamespace(obj=print)
    drawn: Any = SimpleNamespace(obj=SimpleNamespace(is_hypothesis_test=True))
    properties = Properties(rank)
    order: Any = SimpleNamespace(parts={FEATURE: Search()})
    next(properties.pytest_ranks_run_item(order))
    properties.pytest_runtest_setup(plain)
    said = r"do not run on ranks with Hypothesis \d.*: module 'hypothesis.core' has no attribute 'State'"
    with pytest.raises(pytest.fail.Exception, match=said):
        properties.pytest_runtest_setup(drawn)


def test_each_rule_is_checked_once_however_many_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Machine(stateful.RuleBasedStateMachine):
        @stateful.initialize()
        def begin(self) -> None:
            called.append("begin")

        @stateful.rule()
        def step(self) -> None:
            called.append("step")

    called: list[str] = []
    monkeypatch.setattr(
        stateful.RuleBasedStateMachine, "setup_state", stateful.RuleBasedStateMachine.setup_state
    )
    call_before_rules(lambda: called.append("check"))
    for _ in range(3):
        state = Machine.setup_state()
    for rule in (*state.initializers, *state.rules):
        rule.function(Machine)
    assert called == ["check", "begin", "check", "step"]


# What is changed in Hypothesis


def test_a_structure_that_was_sent_is_that_of_the_example_it_came_from() -> None:
    data, other = (ConjectureData.for_choices(choices) for choices in ([4, True], [5]))
    data.draw_integer(0, 9)
    data.start_span(1)
    data.draw_boolean(0.5, forced=True)
    data.stop_span()
    other.draw_integer(0, 9)
    restore_structure(other, pickle.loads(pickle.dumps(structure_of(data))))
    assert (other.choices, other.length, count_spans(other)) == ((4, True), data.length, count_spans(data))
    data.freeze()
    other.freeze()
    assert other.as_result().choices == (4, True)
    assert len(other.spans) == len(data.spans)


def test_the_state_of_a_generator_goes_with_a_structure() -> None:
    random_of = [random.Random(seed) for seed in (1, 2)]
    first, second = (
        ConjectureData(prefix=(), random=each, max_choices=9, provider=providers.HypothesisProvider)
        for each in random_of
    )
    restore_structure(second, structure_of(first))
    assert random_of[1].getstate() == random_of[0].getstate()
    without = ConjectureData.for_choices([])
    assert structure_of(without)[1] is None
    restore_structure(second, structure_of(without))
    restore_structure(without, structure_of(first))


def test_a_failure_keeps_the_origin_that_ranks_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterestingOrigin, "from_exception", InterestingOrigin.from_exception)
    respect_set_origins()
    errors = [ValueError("here"), PeerFailed("there"), PeerFailed("elsewhere")]
    own = origin_of(errors[0])
    for error in errors[1:]:
        set_origin(error, ORIGIN)
    found = [InterestingOrigin.from_exception(error) for error in errors]
    assert found[1] == found[2] != found[0]
    assert own.exception == "ValueError"
    assert origin_of(errors[1]) == Origin(
        f"ValueError at elsewhere.py:{ORIGIN.lineno}", "PeerFailed", "elsewhere.py", ORIGIN.lineno
    )


def test_a_deadline_stays_one_on_all_ranks() -> None:
    error = PeerFailed("there")
    set_origin(error, replace(ORIGIN, exception="DeadlineExceeded"))
    assert vars(error)["_lockstep_origin"].exc_type is DeadlineExceeded


def test_constants_are_held_until_they_are_released() -> None:
    constants = providers.Constants(integers=[1, 2], floats=[0.5], bytes=[b"x"], strings=["s"])
    by_kind = constants_by_kind(constants)
    assert by_kind == {"integers": [1, 2], "floats": [0.5], "bytes": [b"x"], "strings": ["s"]}
    assert constants_by_kind(constants_from(constants, by_kind)) == by_kind
    before = providers._get_local_constants
    hold_constants(constants)
    try:
        assert providers._get_local_constants() is constants
    finally:
        release_constants()
    assert providers._get_local_constants is before


def test_folders_are_left_out_of_explanations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrutineer, "should_trace_file", lambda filename: filename.endswith(".py"))
    exclude_from_explanations("/of/us", "/of/them")
    names = ["/of/us/a.py", "/of/them/a.py", "/a.py", "/a.so"]
    assert [scrutineer.should_trace_file(name) for name in names] == [False, False, True, False]


def test_classes_clock_and_seeds_of_hypothesis_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (core, "StateForActualGivenExecution"),
        (core, "ConjectureRunner"),
        (engine, "time"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    execution, runner, clock = (type(name, (), {}) for name in ("Execution", "Runner", "Clock"))
    replace_execution(execution, runner)
    replace_engine_clock(clock)
    assert (core.StateForActualGivenExecution, core.ConjectureRunner) == (execution, runner)
    assert engine.time is clock
    test = SimpleNamespace(_hypothesis_internal_use_seed=3, _hypothesis_internal_use_generated_seed=4)
    assert (explicit_seed(test), generated_seed(test)) == (3, 4)
    ended = Mock()
    stop_shrinking(ended)
    ended.exit_with.assert_called_once_with(engine.ExitReason.very_slow_shrinking)


def test_a_draw_of_a_body_is_followed_by_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataObject, "draw", lambda data, strategy, label=None: (data, strategy, label))
    checks: list[int] = []
    call_after_draws(lambda: checks.append(1))
    given: Any = "data"
    assert DataObject.draw(given, "strategy", label="x") == ("data", "strategy", "x")  # type: ignore[arg-type]
    assert checks == [1]


# What a run of a property keeps in step


class _Database(InMemoryExampleDatabase):
    def fetch(self, key: bytes) -> Iterable[bytes]:
        raise OSError("gone")


def test_changes_of_a_database_are_made_once_in_order() -> None:
    theirs = InMemoryExampleDatabase()
    shared = LockstepDatabase(theirs, True, lambda _, read: read or [])
    shared.save(KEY, b"a")
    shared.delete(KEY, b"a")
    shared.delete(KEY, b"unknown")
    assert list(shared.fetch(KEY)) == []
    assert repr(shared) == repr(theirs)
    shared.write()
    assert list(theirs.fetch(KEY)) == []
    theirs.save(KEY, b"of another run")
    theirs.save(KEY, b"a")
    shared.write()
    assert sorted(theirs.fetch(KEY)) == [b"a", b"of another run"]


def test_a_database_that_cannot_be_read_after_writing_is_written() -> None:
    theirs = _Database()
    shared = LockstepDatabase(theirs, True, lambda *_: [])
    shared._known[KEY] = {}
    shared.save(KEY, b"a")
    shared.write()
    assert list(InMemoryExampleDatabase.fetch(theirs, KEY)) == [b"a"]


def test_what_all_ranks_read_of_a_database_is_asked_for_once() -> None:
    asked: list[tuple[bytes, list[bytes] | None]] = []
    for is_writer in (True, False):
        shared = LockstepDatabase(
            InMemoryExampleDatabase(), is_writer, lambda key, read: asked.append((key, read)) or [b"c", b"a"]
        )
        assert [list(shared.fetch(KEY)) for _ in range(2)] == [[b"c", b"a"]] * 2
    assert asked == [(KEY, []), (KEY, None)]


class _SameRank:
    def __init__(self) -> None:
        self.cases: list[str] = []

    def exchange(self, case: str, value: object) -> list[object]:
        self.cases.append(case)
        return [value, value]


def test_constants_that_are_equal_are_kept_and_caches_emptied_after_a_difference() -> None:
    same, other = _SameRank(), _OtherRank()
    shared = SharedConstants(same)  # type: ignore[arg-type]
    cache = providers.CONSTANTS_CACHE.cache
    emptied = []
    internals.read_constants()  # which empties them after an import
    try:
        for ranks in (same, other, same, same):
            shared._examples = ranks  # type: ignore[assignment]
            cache["key"] = "value"
            shared.share()
            emptied.append("key" not in cache)
    finally:
        shared.release()
        cache.clear()
    assert emptied == [False, True, True, False]
    assert same.cases == ["the constants of modules"] * 3


class _Run(_Execution):
    """The execution of a property, of which Hypothesis's own part is replaced."""

    def __init__(self, examples: Any) -> None:
        self._examples, self._database, self._is_in_step = examples, Mock(), True
        self._constants = Mock()


def test_settings_of_a_property_are_adapted_to_ranks(tmp_path: Path) -> None:
    peers = _Peers(tmp_path, lambda vote: replace(vote, more=[b"of rank 1"]), rank=1)
    run = _Run(peers.examples)
    theirs = InMemoryExampleDatabase()
    given = settings(database=theirs, deadline=200, report_multiple_bugs=True, print_blob=False)
    adapted = run._adapt(given)
    assert (adapted.deadline, adapted.report_multiple_bugs, adapted.print_blob) == (None, False, True)
    assert adapted.phases == given.phases
    assert isinstance(adapted.database, LockstepDatabase)
    assert adapted.database is run._database
    adapted.database.save(KEY, b"mine")
    adapted.database.write()
    assert list(theirs.fetch(KEY)) == []
    assert list(adapted.database.fetch(KEY)) == [b"of rank 1", b"mine"]
    assert peers.votes[-1].case == f"the database, {KEY.hex()[:8]}"
    own = run._adapt(settings(database=None, deadline=300))
    assert (own.database, own.deadline) == (None, timedelta(milliseconds=300))
    peers.examples.crash_guard.begin_item((CrashedExample(_example(b"a"), "how"),))
    assert run._adapt(given).phases == tuple(each for each in given.phases if each is not Phase.explain)


def _ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, **state: Any) -> str:
    """Return what is done after a run of the engine that ends with an error, in order, and what it raises."""
    run, raises = _Run(Mock()), Mock(side_effect=error)
    vars(run).update(state)
    monkeypatch.setattr(internals.PropertyExecution, "run_engine", raises)
    raised = ""
    try:
        run.run_engine()
    except BaseException as found:
        raised = f" {type(found).__name__}"
    done: list[str] = []
    if run._database is not None:
        done += ["write" for each in run._database.mock_calls if each == call.write()]
    done += ["end" for each in run._examples.mock_calls if each == call.end_run()]
    done += ["release" for each in run._constants.mock_calls if each == call.release()]
    return " ".join(done) + raised


def test_a_property_ends_in_step_whatever_it_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(error: BaseException | None, **state: Any) -> str:
        return _ended(tmp_path, monkeypatch, error, **state)

    of_peers = ExceptionGroup("several", [PeerFailed("a"), PeerFailed("b")])
    both = ExceptionGroup("several", [PeerFailed("a"), ValueError("b")])
    assert ended(None) == "write end release"
    assert ended(ValueError("wrong")) == "write end release ValueError"
    assert ended(of_peers) == "write end release PeerFailed"
    assert ended(both) == "write end release ExceptionGroup"
    assert ended(EndedByOthers("rank 1")) == "release EndedByOthers"
    assert ended(KeyboardInterrupt()) == "write release KeyboardInterrupt"
    assert ended(pytest.exit.Exception("enough")) == "write release Exit"
    assert ended(None, _is_in_step=False) == "write release"
    assert ended(None, _database=None) == "end release"


@pytest.mark.parametrize(
    ("options", "is_recorded"),
    [
        ({}, False),
        ({"expected_failure": None}, False),
        ({"expected_failure": (ValueError("wrong"), "")}, False),
        ({"expected_failure": (Diverged("apart"), "")}, True),
    ],
)
def test_the_last_example_is_recorded_where_ranks_part_in_it(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], is_recorded: bool
) -> None:
    execute = Mock(return_value="result")
    monkeypatch.setattr(internals.PropertyExecution, "execute_once", execute)
    examples = MagicMock()
    data: Any = "data"
    assert _Run(examples).execute_once(data, **options) == "result"
    execute.assert_called_once_with(data, **options)
    assert examples.recorded.called == is_recorded


@pytest.mark.parametrize("database", [None, InMemoryExampleDatabase()], ids=["without", "with"])
def test_a_property_begins_with_the_facts_that_ranks_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: Any
) -> None:
    def begin(self: Any, stuff: Any, test: Any, given: Any, *_: Any, **options: Any) -> None:
        self.test, self.test_runner, self.given = test, lambda data, function: function(data), given

    def body() -> str:
        return "ran"

    monkeypatch.setattr(internals.PropertyExecution, "__init__", begin)
    peers, constants = _Peers(tmp_path, _same), Mock()
    peers.rank.hook.pytest_ranks_example.return_value = None
    monkeypatch.setattr(_Execution, "_examples", peers.examples, raising=False)
    monkeypatch.setattr(_Execution, "_constants", constants, raising=False)
    peers.examples.begin_run = Mock()  # type: ignore[method-assign]
    wrapped = SimpleNamespace(_hypothesis_internal_use_seed=3, _hypothesis_internal_use_generated_seed=4)
    given = settings(database=database, deadline=None, max_examples=7)

    def make() -> Any:
        return _Execution(None, body, given, random.Random(1), wrapped)

    run = make()
    (name, facts), _ = peers.examples.begin_run.call_args
    assert (name, facts["seed"], list(facts)) == ("body", "3", ["seed", "randomness", "settings", "database"])
    assert facts["database"] == ("None" if database is None else "of examples")
    assert "max_examples=7" in facts["settings"]
    assert facts["settings"] == repr(settings(given, database=None))
    assert len(facts["randomness"]) == 16
    assert peers.examples.seed == (4 if database is None else None)
    assert constants.share.call_count == 1
    assert run.given.print_blob
    assert run.test() == "ran"
    assert peers.examples.running.now().is_in_body
    assert run.test_runner(ConjectureData.for_choices([]), lambda _: "in step") == "in step"
    assert peers.votes[-1].case == f"{TRIAL}1"
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(make).result()
    assert (other.given, other.test) == (given, body)
    peers.examples.is_active = False
    assert (make().given, make().test) == (given, body)
    assert constants.share.call_count == 1


def test_an_engine_stops_once_its_search_must(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[object] = []
    monkeypatch.setattr(internals.Engine, "test_function", Mock())
    monkeypatch.setattr(internals, "stop_shrinking", stopped.append)
    runner = _Engine.__new__(_Engine)
    for is_active in (True, False):
        for must_stop in (True, False):
            runner._examples = Mock(is_active=is_active, must_stop=lambda must_stop=must_stop: must_stop)
            runner.test_function(ConjectureData.for_choices([]))
            assert len(stopped) == 1


def test_hypothesis_is_replaced_by_what_keeps_it_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.features.properties.execution.internals", replaced := Mock(wraps=internals))
    for name in (
        "replace_execution",
        "replace_engine_clock",
        "respect_set_origins",
        "exclude_from_explanations",
    ):
        setattr(replaced, name, Mock())
    peers = _Peers(tmp_path, _same)
    peers.examples.crash_guard.install = Mock()  # type: ignore[method-assign]
    keep_in_step(peers.examples)
    execution, runner = replaced.replace_execution.call_args.args
    assert execution._examples is runner._examples is peers.examples
    assert execution._constants._examples is peers.examples
    replaced.replace_engine_clock.assert_called_once_with(peers.examples.clock)
    replaced.respect_set_origins.assert_called_once_with()
    folders = [Path(each).name for each in replaced.exclude_from_explanations.call_args.args]
    assert folders == ["features", "rank"]
    assert Path(replaced.exclude_from_explanations.call_args.args[1], "process.py").exists()
    peers.examples.crash_guard.install.assert_called_once_with()


# Statistics


def test_statistics_are_those_of_one_report_of_one_rank() -> None:
    first, last, stale = (SimpleNamespace(name=name, **{STATISTICS: "old"}) for name in "abc")
    ranks = (RankOutcome(0, [{}]), RankOutcome(1, [{}, {STATISTICS: "of rank 1"}]))
    Searches().pytest_ranks_reported(ItemOutcome(ranks, 1.0, False, 1.0), [first, last])  # type: ignore[list-item]
    assert (vars(first), vars(last)) == ({"name": "a"}, {"name": "b", STATISTICS: "of rank 1"})
    Searches().pytest_ranks_reported(ItemOutcome(ranks[:1], 1.0, False, 1.0), [stale])  # type: ignore[list-item]
    assert vars(stale) == {"name": "c"}
