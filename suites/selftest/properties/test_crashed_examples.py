"""The examples that ended a world, and the search for smaller ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from lockstep.features.properties.crashed_examples import MAX_CRASHES, CrashSearch, find_smallest
from lockstep.features.properties.messages import CRASHED, FEATURE, CrashedExample, RunningExample, Search
from lockstep.protocol import Finished, RankStatus, RunItem
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, Fate, ItemOutcome, RankOutcome, Stuck
from suites.selftest.properties.stand_ins import example_of

FINISHED = Finished(True, 0, 0)
DIED = Died(-9, "", 0.0)
ORDER = RunItem("id", "path", None, "tmp", parts={FEATURE: Search(entropy=5)})


def _stuck(state: str) -> Stuck:
    return Stuck(RankStatus("", "a line", state=state), 0.0)  # type: ignore[arg-type]


def _outcome(*fates: Fate, seconds: float = 1.0, blame: Iterable[int] = ()) -> ItemOutcome:
    ranks = tuple(RankOutcome(rank, fate=fate) for rank, fate in enumerate(fates))
    return ItemOutcome(ranks, 60.0, False, seconds, Diagnosis("", frozenset(blame), True))


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
    crashed = _crashed(_outcome(_stuck("votes"), DIED), example_of(b"longer"), example_of(b"a"))
    assert crashed == (CrashedExample(example_of(b"a"), "rank 1 died: SIGKILL"),)


def test_a_rank_that_hangs_is_blamed_before_one_that_waits() -> None:
    crashed = _crashed(_outcome(_stuck("votes"), _stuck("runs")), example_of(b"a"), example_of(b"b"))
    assert crashed == (CrashedExample(example_of(b"b"), "rank 1 hung in a line"),)


def test_a_rank_that_the_diagnosis_blames_is_blamed() -> None:
    crashed = _crashed(
        _outcome(_stuck("runs"), _stuck("runs"), blame=[1]), example_of(b"a"), example_of(b"b")
    )
    assert [each.example.choices for each in crashed] == [b"b"]


@pytest.mark.parametrize(
    ("fates", "examples"),
    [
        ((FINISHED, FINISHED), (None, None)),
        ((FINISHED, DIED), (None, None)),  # in a fixture, say
        ((FINISHED, _stuck("runs")), (None, example_of(b"a"))),  # the other has ended the test
    ],
)
def test_no_example_is_blamed_for_a_crash_outside_of_it(
    fates: tuple[Fate, ...], examples: tuple[RunningExample | None, ...]
) -> None:
    assert _crashed(_outcome(*fates), *examples) == ()


def test_an_example_that_is_lost_twice_ends_the_search() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED), example_of(b"a")))
    assert not search.add(_ended_in(_outcome(DIED), example_of(b"a")))


def test_after_a_late_crash_the_test_runs_without_a_search() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED, seconds=31.0), example_of(b"a")))
    assert not _search_in(search.order(ORDER)).continues
    assert not search.add(_ended_in(_outcome(DIED), example_of(b"b")))


def test_a_search_ends_no_more_worlds_than_it_may() -> None:
    search, continues = CrashSearch(), []
    for number in range(MAX_CRASHES):
        assert search.add(_ended_in(_outcome(DIED, seconds=0.0), example_of(str(number).encode())))
        continues.append(_search_in(search.order(ORDER)).continues)
    assert continues == [True] * (MAX_CRASHES - 1) + [False]


def test_a_search_without_crashes_looks_for_the_smallest_example() -> None:
    assert Search() == Search(0, (), continues=True)


def test_a_quick_loss_leaves_time_to_search_on() -> None:
    search = CrashSearch()
    assert search.add(_ended_in(_outcome(DIED), example_of(b"a")))
    found = _search_in(search.order(ORDER))
    assert (found.continues, found.entropy) == (True, 5)


def test_ranks_outside_of_an_example_are_not_blamed() -> None:
    crashed = _crashed(_outcome(_stuck("runs"), _stuck("runs")), None, example_of(b"b"))
    assert [each.how for each in crashed] == ["rank 1 hung in a line"]


def test_the_crash_of_the_example_that_a_search_ends_with_is_reported() -> None:
    first, second = (_ended_in(_outcome(DIED), example_of(choices)) for choices in (b"ab", b"a"))
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
