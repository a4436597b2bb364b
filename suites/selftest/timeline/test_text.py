"""Unit tests of the text of a timeline: which collectives it shows, and what it says of each rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.features.timeline.text import as_text
from lockstep.features.timeline.timeline import WORLD, Bar, Key, Lane, State, Timeline
from lockstep.flight_entries import DEFAULT_GROUP


def bar(number: int, state: State = "over", **fields: Any) -> Bar:
    """Return a call that took 10 µs, and that began `number` milliseconds after the test."""
    group = fields.pop("group", DEFAULT_GROUP)
    begun = number * 1_000_000
    given = {"key": (group, 0, number), "op": "barrier", "begun": begun, "end": begun + 10_000}
    return Bar(**{**given, "state": state, "has_end": True, **fields})


def lane(rank: int, *bars: Bar, missing: tuple[Key, ...] = (), fate: str = "passed", **fields: Any) -> Lane:
    place = fields.pop("place", "")
    return Lane(rank, bars, missing, (), fate, place, **fields)


def text(*lanes: Lane, groups: dict[tuple[str, int], tuple[int, ...]] | None = None) -> list[str]:
    return as_text(Timeline("id", lanes, 0, 10**9, groups=groups or {})).splitlines()


def test_who_waits_and_who_never_came_are_on_two_lines() -> None:
    waits = bar(2, "waits", op="all_gather", group="3 of 9", lines=("f() at a.py:3", "g() at b.py:1"))
    groups = {("3 of 9", 0): (0, 1)}
    first = lane(0, bar(1), replace(waits, phase="forward"), fate="waits")
    second = lane(1, bar(1), missing=(waits.key,), place="a.py:9")
    assert text(first, second, groups=groups) == [
        "rank 0  barrier #1 █  all_gather #2 (A) ███████ waits  f() at a.py:3 (forward)",
        "rank 1  barrier #1 █  ─ never came ─                   a.py:9",
        "A: ranks 0, 1 (torch's group 3)",
    ]
    assert text(replace(first, bars=(bar(1), waits)), second, groups=groups)[0].endswith(
        "waits  f() at a.py:3"
    )


def test_ranks_that_did_the_same_share_a_line_with_the_longest_bar() -> None:
    lanes = [lane(rank, bar(1, end=1_000_000 + 10**took)) for rank, took in ((0, 3), (1, 9), (2, 6))]
    failed = replace(lanes[0], rank=10, fate="failed")
    assert text(*lanes, failed) == [
        "ranks 0-2  barrier #1 ██████  passed",
        "rank 10    barrier #1 █       failed",
    ]


@pytest.mark.parametrize(
    ("micros", "blocks"), [(1, 1), (99, 1), (100, 2), (999, 2), (1000, 3), (10**5, 5), (10**6, 6), (10**9, 6)]
)
def test_a_bar_is_a_block_longer_for_each_tenfold(micros: int, blocks: int) -> None:
    assert text(lane(0, bar(1, end=1_000_000 + micros * 1000)), lane(1)) == [
        f"rank 0  barrier #1 {'█' * blocks}  passed",
        f"rank 1              {' ' * blocks} passed",
    ]


def test_a_call_that_failed_or_differs_is_marked() -> None:
    failed, other = bar(1, "failed", is_mismatch=True), bar(1, is_mismatch=True, op="broadcast")
    lanes = (
        lane(0, replace(failed, lines=("f() at a.py:1",))),
        lane(1, replace(other, lines=("g() at b.py:2",))),
    )
    assert text(*lanes) == [
        "rank 0  barrier #1 ███████ failed ≠  f() at a.py:1",
        "rank 1  broadcast #1 █ ≠             g() at b.py:2",
    ]


def test_a_dead_rank_has_its_end_and_what_others_show_of_it() -> None:
    lost = bar(2, "failed")
    dead = {"died_at": 5, "is_known": False, "fate": "died: SIGKILL", "missing": (lost.key,)}
    inferred = bar(1, "inferred")
    alive = lane(0, bar(1), replace(lost, lines=("f() at a.py:3",)))
    assert text(alive, lane(1, inferred, place="a.py:7", **dead)) == [
        "rank 0  barrier #1 █   barrier #2 ███████ failed  f() at a.py:3",
        "rank 1  barrier #1 ░░  ─ never came ─             ✗ died: SIGKILL, a.py:7",
        "░: rank 1 left no record; the records of others show it",
    ]
    assert text(alive, lane(1, inferred, **dead))[1].endswith("✗ died: SIGKILL")


def test_a_timeline_has_twelve_lines_at_most() -> None:
    healthy = [lane(rank, bar(1), fate=f"fate {rank}") for rank in range(12)]
    assert len(text(*healthy)) == 12
    assert text(*healthy)[-1].startswith("rank 11 ")
    late = lane(12, missing=(("", 0, 1),), fate="late")
    blamed = lane(13, fate="blamed", is_blamed=True)
    shown = text(*healthy, late, blamed)
    assert [line.split()[1] for line in shown[:-1]] == [*map(str, range(9)), "12", "13"]
    assert shown[-1] == "... and 3 more"


def test_notes_take_the_place_of_lines() -> None:
    lanes = [lane(rank, bar(1, group="7"), fate=f"fate {rank}") for rank in range(12)]
    *shown, more, note = text(*lanes)
    assert (len(shown), more) == (10, "... and 2 more")
    assert note == "A: ranks 0-11 (torch's group 7)"


def columns(*lanes: Lane, groups: dict[tuple[str, int], tuple[int, ...]] | None = None) -> list[int]:
    """Return the numbers of the collectives in the first line."""
    line = text(*lanes, groups=groups)[0]
    return [int(word[1:]) for word in line.split() if word.startswith("#")]


def test_the_last_four_collectives_are_shown() -> None:
    bars = [bar(number) for number in range(1, 8)]
    assert columns(lane(0, *bars), lane(1, *bars)) == [4, 5, 6, 7]


def test_fewer_collectives_with_long_names_are_shown() -> None:
    # With " #1" and 10 characters for its bar each takes 55 of 110.
    bars = [bar(number, op="o" * 42) for number in range(1, 4)]
    assert columns(lane(0, *bars), lane(1, *bars)) == [2, 3]
    longer = [replace(each, op="o" * 43) for each in bars]
    assert columns(lane(0, *longer), lane(1, *longer)) == [3]
    longest = [replace(each, op="o" * 200) for each in bars]
    assert columns(lane(0, *longest), lane(1, *longest)) == [3]


def test_what_a_rank_waits_in_is_shown_although_it_is_old() -> None:
    later = [bar(number) for number in range(2, 9)]
    waits = bar(1, "waits")
    assert columns(lane(0, waits, *later), lane(1, *later)) == [1, 6, 7, 8]
    newest = bar(9, "waits")
    assert columns(lane(0, *later, newest), lane(1, *later)) == [6, 7, 8, 9]


def test_a_rank_that_waits_in_a_receive_is_shown_at_its_last_line() -> None:
    receive = bar(3, "waits", op="recv", peer=1, lines=("f() at a.py:3",))
    assert (
        text(lane(0, bar(1), receive, place="a.py:9"), lane(1, bar(1)))[0] == "rank 0  barrier #1 █  a.py:9"
    )


def test_a_wait_without_a_line_is_shown_at_the_last_line() -> None:
    assert text(lane(0, bar(1, "waits"), place="a.py:9"), lane(1))[0].endswith("waits  a.py:9")


def test_at_most_two_waits_are_shown_before_the_last() -> None:
    later = [bar(number) for number in range(4, 9)]
    lanes = [lane(rank, bar(rank + 1, "waits", lines=(f"line {rank}",)), *later) for rank in range(3)]
    lines = text(*lanes)
    assert ["waits" in line for line in lines] == [True, True, False]
    assert [line.split("  ")[-1] for line in lines] == ["line 0", "line 1", "passed"]
    assert columns(*lanes) == [1, 7, 8]


def test_collectives_of_a_rank_alone_or_of_none_at_fault_are_left_out() -> None:
    alone = bar(3, group="alone")
    groups = {("alone", 0): (0,), ("others", 0): (2, 3)}
    assert columns(lane(0, bar(1), bar(2), alone), lane(1, bar(1)), groups=groups) == [1, 2]
    of_others = bar(3, group="others")
    lanes = [lane(rank, bar(2), bar(1)) for rank in (0, 1)]
    lanes += [lane(rank, bar(2), of_others, bar(1)) for rank in (2, 3)]
    assert "others" in text(*lanes, groups=groups)[-1]
    lanes[0] = replace(lanes[0], is_blamed=True)
    assert "others" not in text(*lanes, groups=groups)[-1]


def test_a_rank_is_shown_at_what_it_waits_in() -> None:
    old = replace(bar(1, "waits", lines=("old() at a.py:1",)), key=(DEFAULT_GROUP, WORLD, 1))
    lost = bar(2, "failed", lines=("lost() at a.py:2",))
    waits = bar(3, "waits", lines=("waits() at a.py:3",))
    assert text(lane(0, old, lost, waits), lane(1))[0].endswith("waits() at a.py:3")
    assert text(lane(0, old, lost), lane(1))[0].endswith("lost() at a.py:2")
    assert text(lane(0, old), lane(1))[0].endswith("old() at a.py:1")


def test_only_four_notes_are_shown() -> None:
    bars = [bar(number, group=str(number)) for number in range(1, 5)]
    *_, last = text(lane(0, *bars), lane(1, *bars, is_known=False, fate="failed"))
    assert last == "D: ranks 0, 1 (torch's group 4)"
