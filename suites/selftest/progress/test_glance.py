"""Places of ranks that stand still while a test runs."""

from __future__ import annotations

from lockstep.features.progress.glance import Places
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import Issued, Progress, RankStatus


def in_all_gather(number: int, group: str = DEFAULT_GROUP) -> RankStatus:
    issued = Issued(group, (), number, "all_gather", (), (), in_flight=True)
    return RankStatus("", "train.py:41 in step", "all_gather", (issued,))


def at(line: int, *, computes: bool = False) -> Progress:
    return Progress(where=f"train.py:{line} in save", computes=computes)


def test_all_ranks_are_named_once_one_has_stood_still_for_two_seconds() -> None:
    places = Places()
    for now in (0.0, 1.0, 2.0):
        for rank in (0, 1, 2, 4):
            places.note(rank, in_all_gather(7), now)
        places.note(3, at(70 + int(now)), now)
        assert bool(places.standing(now)) == (now == 2.0)
    assert places.standing(2.0) == "ranks 0-2, 4 in all_gather #7, rank 3 in save() at train.py:72"


def test_ranks_that_move_or_compute_do_not_stand_still() -> None:
    places = Places()
    for now in range(5):
        places.note(0, in_all_gather(now), now)
        places.note(1, at(77, computes=True), now)
    assert places.standing(5) == ""


def test_a_rank_that_sleeps_or_is_silent_stands_still() -> None:
    places = Places()
    for now in range(3):
        places.note(0, at(77), now)
        places.note_silent([1], now)
    assert places.standing(2) == "rank 0 in save() at train.py:77, rank 1 not responding"


def test_other_groups_and_ends_are_named() -> None:
    places = Places()
    for now in (0, 2):
        places.note(0, in_all_gather(1, "tp"), now)
        places.note(1, RankStatus("", "", state="votes"), now)
        places.note(2, RankStatus("", "", state="idle"), now)
    assert places.standing(2) == (
        "rank 0 in all_gather #1 of group tp, rank 1 at the end of its subtest, rank 2 at the end of the test"
    )


def test_the_subtest_is_that_of_the_last_rank() -> None:
    places = Places()
    places.note(0, Progress("subtest 10 of 144"), 0)
    places.note(1, Progress("subtest 9 of 144"), 0)
    assert places.count() == "subtest 9 of 144"
