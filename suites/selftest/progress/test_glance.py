"""Places of ranks that stand still while a test runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lockstep.features.progress.glance import Glance, Places
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


def test_a_place_is_that_of_the_last_answer_and_of_what_it_has_called() -> None:
    places = Places()
    answers = [
        Progress(where="train.py:7 in save", call="torch.save"),
        Progress(where="train.py:7 in <module>"),
        Progress(where="in C"),
        Progress(where="train.py:7 in save", call="item"),
        RankStatus("", "train.py:9 in step", state="stopped"),
        RankStatus("", "train.py:9 in step", state="silent"),
        RankStatus("", "train.py:9 in step", state="runs"),
        RankStatus("", "train.py:9 in step", "item", state="reports"),
    ]
    for now in (0, 2):
        for rank, answer in enumerate(answers):
            places.note(rank, answer, now)
        places.note(8, Progress(), now)
    assert places.standing(1.9) == ""
    assert places.standing(2).split(", rank ") == [
        "ranks 0, 1 at train.py:7",
        "2 at in C",
        "3 in item() at train.py:7",
        "4 stopped",
        "5 not responding",
        "6 in step() at train.py:9",
        "7 in item() at train.py:9",
    ]


def test_a_glance_has_what_the_ranks_have_reported_so_far() -> None:
    def glance(*of_ranks: str, importing: tuple[str, ...] = (), count: str = "") -> Glance:
        """Of reports: "p" and "f" are subtests, "P" and "F" phases, which passed or failed."""
        outcomes = []
        for letters in of_ranks:
            reports: list[dict[str, Any]] = []
            for letter in letters:
                kind = "TestReport" if letter.isupper() else "SubtestReport"
                outcome = "failed" if letter in "fF" else "passed"
                reports.append({"$report_type": kind, "outcome": outcome})
            outcomes.append(SimpleNamespace(reports=reports))
        clock = SimpleNamespace(importing=dict(enumerate(importing)), begun=10.0, deadline=70.0)
        run: Any = SimpleNamespace(outcomes=outcomes, clock=clock, label="a.py::b")
        places = Places()
        places.note(0, Progress(count), 0.0)
        return places.glance(run, 15.0)

    assert glance("PppF", "PpfFf") == Glance("a.py::b", 5.0, 60.0, "2 subtests ended", 2, "")
    assert glance("P", "Pp").activity == ""
    assert glance("Pp", "Pp", count="example 23").activity == "example 23"
    assert glance("Pp", "Pp", importing=("b.py", "a.py"), count="example 23").activity == "imports a.py"
