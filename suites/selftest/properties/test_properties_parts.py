"""The parts that keep property tests on ranks in step, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase
from hypothesis.internal.conjecture import providers
from hypothesis.internal.conjecture.data import ConjectureData

from lockstep.features.properties.attempt import Attempt
from lockstep.features.properties.crashed import CrashGuard, RankCrashed
from lockstep.features.properties.crashed_examples import CrashSearch, find_smallest
from lockstep.features.properties.desync import END, OutOfStep, describe_draws
from lockstep.features.properties.examples import Examples
from lockstep.features.properties.execution import LockstepDatabase, SharedConstants
from lockstep.features.properties.hypothesis_internals import call_before_rules
from lockstep.features.properties.messages import (
    CRASHED,
    FEATURE,
    STATISTICS,
    CrashedExample,
    Drawn,
    ExampleResult,
    RunningExample,
    RunningExampleFile,
    Search,
    read_running_example,
)
from lockstep.features.properties.plugin import Searches
from lockstep.features.properties.rank import Properties
from lockstep.protocol import Finished, RankStatus, RunItem, Vote
from lockstep.rank.world_fixture import RankWorld
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
    assert [(vote.case, vote.outcome) for vote in votes] == [(END, "ended it")]


def test_draws_in_bounds_that_read_alike_are_named_by_their_example() -> None:
    drawn = [[Drawn("0.5 (float)", "x")], [Drawn("0.5 (float)", "x")]]
    assert describe_draws("example 3", drawn).startswith("ranks drew with different bounds in example 3.\n")


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


# Statistics


def test_statistics_are_those_of_one_report_of_one_rank() -> None:
    first, last, stale = (SimpleNamespace(name=name, **{STATISTICS: "old"}) for name in "abc")
    ranks = (RankOutcome(0, [{}]), RankOutcome(1, [{}, {STATISTICS: "of rank 1"}]))
    Searches().pytest_ranks_reported(ItemOutcome(ranks, 1.0, False, 1.0), [first, last])  # type: ignore[list-item]
    assert (vars(first), vars(last)) == ({"name": "a"}, {"name": "b", STATISTICS: "of rank 1"})
    Searches().pytest_ranks_reported(ItemOutcome(ranks[:1], 1.0, False, 1.0), [stale])  # type: ignore[list-item]
    assert vars(stale) == {"name": "c"}
