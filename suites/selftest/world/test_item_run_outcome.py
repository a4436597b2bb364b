"""The outcome that the controller's loop over one item ends with."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.protocol import Finished, Preparation, RankStatus, Reported, RunItem
from lockstep.world import item_run
from lockstep.world.outcome import Stuck
from suites.selftest.world.steps import DEAD, FAILED, FINISHED, ORDER, PASSED, Steps, report, waits_in


def test_features_see_an_outcome_that_has_something_to_say() -> None:
    def seen(*messages: Any, order: RunItem = ORDER) -> bool:
        run = Steps(order=order)
        run.take(0, *PASSED, FINISHED)
        run.take(1, *messages)
        outcome = run._outcome()
        assert run.feature.calls in ([], [("outcome", outcome)])
        return bool(run.feature.calls)

    assert not seen(*PASSED, FINISHED)
    assert seen(FAILED, FINISHED)
    assert seen(*PASSED, Finished(False, 0, 0))
    assert seen(*PASSED, Finished(True, 0, 0, parts={"mine": 1}))
    assert seen(*PASSED, FINISHED, order=RunItem("test_a.py::test_a", "test_a.py", None, "", parts={"a": 1}))


def test_an_outcome_has_the_times_and_what_features_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    preparation = Preparation("stage", "first")
    run = Steps(timeout=5.0, order=RunItem("a.py::test[1]", "a.py", None, "", preparation=preparation))
    run.parts["mine"] = 1
    run.take(0, FINISHED)
    run.take(1, FINISHED)
    now[0] = 104.0
    outcome = run._outcome()
    assert run.label == "a.py::test::first[1]"
    assert (outcome.timeout, outcome.timed_out, outcome.seconds) == (5.0, False, 4.0)
    assert (outcome.parts, outcome.preparation) == ({"mine": 1}, preparation)
    assert [rank.rank for rank in outcome.ranks] == [0, 1]
    now[0] = 105.0
    assert run._outcome().timed_out


def test_a_mismatch_is_found_in_the_statuses_of_failures() -> None:
    run = Steps()
    assert run._find_diagnosis() is None
    run.take(0, Reported(report("failed"), waits_in("all_reduce")), FINISHED)
    run.take(1, Reported(report("failed"), waits_in("barrier")), FINISHED)
    found = run._find_diagnosis()
    assert found is not None
    assert found.sentence.startswith("mismatch")
    known = run._standstill.diagnosis = item_run.Diagnosis("known", frozenset(), False)
    assert run._find_diagnosis() is known


def test_after_an_expected_death_others_differ() -> None:
    run = Steps(3)
    run.feature.excuse = "as expected"
    run.take(0, DEAD)
    run.take(1, Reported(report("failed"), waits_in("all_reduce")), FINISHED)
    run.take(2, Reported(report("failed"), waits_in("barrier")), FINISHED)
    assert run.has_lost()
    assert run._size() == 3
    assert run._find_diagnosis() is None
    run.outcomes[0].has_left_world = True
    assert not run.has_lost()
    assert run._size() == 2
    assert run._find_diagnosis() is not None


def test_the_others_are_asked_about_a_rank_that_was_ended() -> None:
    run = Steps()
    run.ranks[1].answer = RankStatus("", "b.py:2 in g")
    run.outcomes[0].fate = Stuck(waits_in("all_reduce"), 0.0)
    run.outcomes[0].status = waits_in("all_reduce")
    found = run._find_diagnosis()
    assert run.asked == {1}
    assert found is not None
    assert "b.py:2 in g" in found.sentence
    run.asked.clear()
    run.take(1, FAILED)
    assert run._find_diagnosis() is None
    assert not run.asked
