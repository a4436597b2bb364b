"""Unit tests of the data of a timeline, and of its scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.features.timeline.scale import END, FAULT, Scale
from lockstep.features.timeline.timeline import Bar, Key, Lane, Span, State, Timeline, members_of
from lockstep.flight_entries import DEFAULT_GROUP


def bar(number: int, state: State = "over", group: str = DEFAULT_GROUP, **fields: Any) -> Bar:
    return Bar((group, 0, number), "barrier", 10 * number, 10 * number + 5, state, True, **fields)


def lane(rank: int, *bars: Bar, missing: tuple[Key, ...] = (), **fields: Any) -> Lane:
    return Lane(rank, bars, missing, (), "passed", "", **fields)


def timeline(*lanes: Lane, **fields: Any) -> Timeline:
    return Timeline("id", lanes, 0, 100, **fields)


def test_a_call_has_its_number_or_its_peer_as_a_name() -> None:
    assert bar(3).name == "barrier #3"
    assert bar(3, peer=0).name == "barrier"


def test_a_call_has_the_innermost_line_and_its_world() -> None:
    assert (bar(1).line, bar(1, lines=("f", "g")).line) == ("", "f")
    assert [replace(bar(1), key=("", n, 1)).worlds_ago for n in (0, 999, 1000, 2001)] == [0, 0, 1, 2]


def test_a_collective_joins_bars_and_a_send_does_not() -> None:
    lanes = lane(0, bar(2), bar(1), bar(7, peer=1)), lane(1, bar(1))
    assert timeline(*lanes).joins == {
        (DEFAULT_GROUP, 0, 1): {0: bar(1), 1: bar(1)},
        (DEFAULT_GROUP, 0, 2): {0: bar(2)},
    }


def test_those_at_fault_are_blamed_or_late() -> None:
    missing = (bar(1).key,)
    waits = lane(2, bar(2, "waits"), bar(3), missing=missing)
    healthy = lane(0, bar(1))
    assert timeline(healthy, lane(1, bar(3), missing=missing), waits).at_fault == {1}
    assert timeline(healthy, lane(1, missing=missing, is_blamed=True), lane(3, is_blamed=True)).at_fault == {
        1,
        3,
    }
    assert timeline(healthy, waits).at_fault == {2}
    assert timeline(healthy).at_fault == frozenset()


@pytest.mark.parametrize(
    "faulty",
    [
        lane(1, missing=(bar(1).key,)),
        lane(1, died_at=0),
        lane(1, bar(1), bar(2, "failed")),
        lane(1, bar(1, "waits"), bar(2)),
    ],
)
def test_a_fault_is_a_death_or_a_collective_that_lacks_a_rank(faulty: Lane) -> None:
    assert timeline(lane(0, bar(1)), faulty).has_fault()
    assert not timeline(lane(0, bar(1), bar(2, "inferred"))).has_fault()


def test_a_group_that_is_gone_has_the_ranks_of_its_name() -> None:
    groups = {("a", 0): (0, 1), ("a", 2): (1, 2), ("c", 1): (2,)}
    ranks = lane(0), lane(1), lane(2)
    assert [members_of(groups, ("a", gone), ranks) for gone in range(3)] == [(0, 1), (0, 1), (1, 2)]
    assert members_of(groups, ("b", 0), ranks) == members_of(groups, ("c", 0), ranks) == (0, 1, 2)
    assert timeline(*ranks, groups=groups).members("c") == (0, 1, 2)
    assert timeline(*ranks, groups=groups).members("a", 2) == (1, 2)


def test_each_group_but_the_default_one_has_a_letter() -> None:
    bars = [bar(number, group=f"{number}") for number in range(1, 29)]
    letters = timeline(lane(0, bar(0), *bars)).letters()
    assert (letters["1"], letters["2"], letters["26"]) == ("A", "B", "Z")
    assert (letters["27"], letters["28"]) == ("G26", "G27")
    assert DEFAULT_GROUP not in letters


def test_calls_since_the_oldest_collective_shown_are_kept() -> None:
    early, late = Span("setup", 0, 20), Span("call", 0, 21)
    send = replace(bar(9, peer=1), begun=20)
    first = replace(lane(0, bar(1), bar(1, peer=1), send, bar(2), bar(3)), spans=(early, late))
    last = timeline(first, lane(1, bar(1), bar(2))).last(2)
    assert last.lanes == (
        replace(first, bars=(send, bar(2), bar(3)), spans=(replace(late, begun=20),)),
        lane(1, bar(2)),
    )
    assert (last.begun, last.num_left_out) == (20, 3)


# Scale


def at(begun: int, end: int, state: State = "over", has_end: bool = True) -> Bar:
    return Bar((DEFAULT_GROUP, 0, begun), "barrier", begun, end, state, has_end)


def test_a_scale_grows_with_the_logarithm_of_the_time() -> None:
    scale = Scale(timeline(lane(0, at(180_000, 2_160_000)), lane(1)))
    # The picture ends at 100 ns, before the bars: they count.
    first = 6 + 16 * 0.0021661
    second = 6 + 16 * 0.9997829
    third = 6 + 16 * 2
    assert scale.width == pytest.approx(first + second + third, abs=1e-4)
    assert scale.left(0) == scale.right(-1) == 0.0
    assert scale.left(100) == pytest.approx(100 * first / scale.width, abs=1e-4)
    assert scale.left(180_000) == pytest.approx(100 * (first + second) / scale.width, abs=1e-4)
    assert scale.left(2_160_000) == scale.left(9_999_999) == 100.0
    middle = scale.left(180_000) + (100 - scale.left(180_000)) / 4
    assert scale.left(180_000 + 1_980_000 // 4) == pytest.approx(middle)
    assert scale.units(10, 60) == scale.width / 2


def test_an_end_that_is_not_known_has_a_place_of_its_own() -> None:
    known = Scale(timeline(lane(0, at(10, 50))))
    for state in ("over", "inferred"):
        scale = Scale(timeline(lane(0, at(10, 50, state, has_end=False))))
        assert scale.width == known.width + END
        assert scale.units(scale.left(50), scale.right(50)) == pytest.approx(END)
        assert scale.left(10) == scale.right(10)
        assert scale.left(75) == pytest.approx((scale.right(50) + scale.left(100)) / 2)


def test_the_end_of_a_picture_of_a_fault_has_room_for_labels() -> None:
    healthy = Scale(timeline(lane(0, at(10, 50)), lane(1, at(20, 50))))
    late = timeline(lane(0, at(10, 50)), lane(1, at(20, 50), missing=(bar(9).key,)))
    scale = Scale(late)
    assert scale.width == pytest.approx(healthy.width + FAULT)
    assert scale.units(scale.left(50), 100) == pytest.approx(healthy.units(healthy.left(50), 100) + FAULT)


def test_a_death_and_what_began_before_the_picture_are_on_the_scale() -> None:
    dead = lane(0, died_at=60)
    assert Scale(replace(timeline(dead), begun=10)).width == pytest.approx(FAULT + 2 * 6.0, abs=0.1)
    # A bar that began before the picture: at its left edge.
    scale = Scale(replace(timeline(lane(0, at(5, 50))), begun=10))
    assert scale.left(5) == 0.0
    assert scale.width == pytest.approx(2 * 6.0, abs=0.1)


def test_an_empty_picture_has_a_width() -> None:
    assert Scale(Timeline("id", (), begun=0, end=0)).width == 1.0
