"""The outcome of an item: its verdicts, its words, and whether it leaves a clean world."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.protocol import Finished, Preparation, RankStatus
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck, in_preparation, label_of

FINISHED = Finished(True, 3, 1)
STUCK = Stuck(RankStatus("", ""), 0.0)
DIED = Died(1, "", 0.0)
FOUND = Diagnosis("sentence", frozenset(), False)
PHASES = ("setup", "call", "teardown")


def report(
    outcome: str = "passed", when: str = "call", kind: str = "TestReport", **more: Any
) -> dict[str, Any]:
    return {"outcome": outcome, "when": when, "$report_type": kind, "longrepr": "", **more}


def rank(number: int = 0, fate: Any = FINISHED, reports: Any = None, **more: Any) -> RankOutcome:
    given = [report(when=when) for when in PHASES] if reports is None else list(reports)
    return RankOutcome(number, given, fate=fate, **more)


def outcome(*ranks: RankOutcome, **more: Any) -> ItemOutcome:
    return ItemOutcome(ranks, 60.0, False, 1.0, **more)


@pytest.mark.parametrize(
    ("code", "more", "how"),
    [
        (None, {}, "closed its connection to the controller"),
        (0, {}, "exited with code 0"),
        (1, {}, "exited with code 1"),
        (-1, {}, "died: SIGHUP"),
        (-9, {}, "died: SIGKILL"),
        (-200, {}, "died: signal 200"),
        (-9, {"stood_still": True}, "stood still, and was ended by the harness"),
        (None, {"host_gone": "far"}, "was lost: host far is gone"),
        (-9, {"host_gone": "far", "stood_still": True}, "was lost: host far is gone"),
    ],
)
def test_a_death_is_named_by_its_cause(code: int | None, more: dict[str, Any], how: str) -> None:
    assert Died(code, "", 0.0, **more).how == how


def test_a_rank_has_failed_if_it_died_or_a_phase_failed() -> None:
    assert not rank().has_failed()
    assert not rank(fate=STUCK).has_failed()
    assert rank(fate=DIED).has_failed()
    assert not rank(fate=DIED, excuse="as expected").has_failed()
    assert rank(reports=[report(), report("failed")]).has_failed()
    assert not rank(reports=[report("failed", kind="SubtestReport")]).has_failed()


def test_a_rank_has_xpassed_by_pytest_s_report_of_a_phase() -> None:
    strict = report("failed", longrepr="[XPASS(strict)] reason")
    assert rank(reports=[report("failed"), strict]).has_xpassed()
    assert not rank(reports=[report("failed", longrepr="of [XPASS(strict)]")]).has_xpassed()
    assert not rank(reports=[report("passed", longrepr="[XPASS(strict)] reason")]).has_xpassed()


def test_parts_are_those_of_the_end_of_an_item() -> None:
    assert rank(fate=Finished(True, 0, 0, parts={"mine": 1})).parts() == {"mine": 1}
    assert rank(fate=STUCK).parts() == {}


def test_a_rank_has_passed_if_it_ended_and_all_of_it_passed() -> None:
    assert rank().has_passed() is True
    assert not rank(fate=STUCK).has_passed()
    assert not rank(reports=[report(), report("skipped")]).has_passed()


def test_a_world_is_named_by_its_size() -> None:
    assert outcome(rank(), rank(1), rank(2)).world == "3"
    assert outcome(rank(world="a rank of 8"), rank(1)).world == "a rank of 8"


def test_a_fault_is_a_rank_that_has_not_ended_or_a_mismatch() -> None:
    assert outcome(rank(), rank(1)).has_fault() is False
    assert outcome(rank(), rank(1, STUCK)).has_fault()
    assert outcome(rank(), rank(1, DIED)).has_fault()
    assert outcome(rank(), diagnosis=FOUND).has_fault()
    assert outcome(rank(), diagnoses={"n=1": FOUND}).has_fault()


@pytest.mark.parametrize(
    "others",
    [
        rank(1, STUCK),
        rank(1, Finished(False, 3, 1)),
        rank(1, Finished(True, 4, 1)),
        rank(1, Finished(True, 3, 2)),
        rank(1, reports=[report(), report("failed", kind="SubtestReport")]),
        rank(1, reports=[report("skipped", wasxfail="reason"), report()]),
    ],
)
def test_a_world_is_not_clean_after_a_failure_or_out_of_step(others: RankOutcome) -> None:
    assert not outcome(rank(), others).is_clean()


def test_a_world_is_clean_after_a_pass_or_a_skip() -> None:
    assert outcome(rank(), rank(1)).is_clean()
    assert outcome(rank(reports=[report("skipped")]), rank(1)).is_clean()
    assert outcome(rank(reports=[report("passed", wasxfail="reason")]), rank(1)).is_clean()


def test_an_item_has_passed_if_all_phases_of_all_ranks_did() -> None:
    assert outcome(rank(), rank(1)).has_passed()
    assert not outcome(rank(), rank(1), diagnosis=FOUND).has_passed()
    assert not outcome(rank(), rank(1, STUCK)).has_passed()
    assert not outcome(rank(), rank(1, left_in_flight="all_reduce")).has_passed()
    with_subtest = rank(
        1, reports=[report(when="setup"), report(), *(report(when=when) for when in PHASES[1:])]
    )
    assert not outcome(rank(), with_subtest).has_passed()


def test_the_ranks_that_ended_are_known_by_place_and_message() -> None:
    other = Finished(True, 4, 1)
    found = outcome(rank(5), rank(6, STUCK), rank(7, other))
    assert found.ended() == {0, 2}
    assert found.finished() == [FINISHED, other]


def test_a_preparation_is_in_the_name_of_what_runs() -> None:
    stage = Preparation("stage", "save")
    assert label_of("a.py::test_a[1::2]", None) == "a.py::test_a[1::2]"
    assert label_of("a.py::test_a[1[2]]", stage) == "a.py::test_a::save[1[2]]"
    assert label_of("a.py::A::test_a", stage) == "a.py::A::test_a::save"
    assert in_preparation(stage, 1) == "in the stage `save`, on 1 rank before the test:"
    assert in_preparation(stage, 2) == "in the stage `save`, on 2 ranks before the test:"
