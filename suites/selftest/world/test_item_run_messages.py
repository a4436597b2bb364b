"""Single steps of the controller's loop over one item: messages of ranks, and signals to them."""

from __future__ import annotations

import math
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
from pluggy import PluginManager

from lockstep import feature_hooks
from lockstep.protocol import (
    Collecting,
    Finished,
    ItemStarted,
    Part,
    Progress,
    RankStatus,
    Ready,
    Reported,
    RunItem,
)
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, RankOutcome
from suites.selftest.world.steps import DEAD, FINISHED, ORDER, PASSED, WARNED, Steps, report, waits_in


def test_messages_of_a_rank_are_kept_by_their_kind() -> None:
    run = Steps()
    part, progress, status = Part("mine", 1), Progress(), RankStatus("", "here")
    run._probes.unanswered = {0, 1}
    run.take(1, *PASSED[:2], WARNED, part, progress, Ready())
    assert run.outcomes[1].reports == [each.data for each in PASSED[:2]]
    assert run.outcomes[1].warnings == [WARNED]
    assert run.feature.calls == [("message", 1, part), ("answer", 1, progress)]
    assert run._probes.unanswered == {0}
    run.take(0, status)
    assert run._probes.answers == {0: status}
    assert run.feature.calls[2:] == [("answer", 0, status)]
    assert run.outcomes[0] == RankOutcome(0)


def test_the_first_status_of_a_failure_stays() -> None:
    run = Steps()
    first, second = RankStatus("", "first"), RankStatus("", "second")
    subtest = {"outcome": "failed", "$report_type": "SubtestReport"}
    run.take(0, Reported(subtest, RankStatus("", "of a subtest")))
    assert run.outcomes[0].status is None
    run.take(0, Reported(report("passed")), Reported(report("failed"), first))
    run.take(0, Reported(report("failed"), second), Finished(True, 0, 0, status=second))
    assert run.outcomes[0].status is first
    run.take(1, Finished(True, 0, 0, status=second))
    assert run.outcomes[1].status is second


def test_failed_cases_are_compared_between_ranks() -> None:
    run = Steps()
    subtest = {"outcome": "failed", "$report_type": "SubtestReport"}
    for rank, op in enumerate(("all_reduce", "barrier")):
        run.take(rank, Reported(subtest, waits_in(op, case="n=1")), Reported(subtest, waits_in(op)))
        run.take(rank, Reported(subtest))
        run.take(rank, FINISHED)
    outcome = run._outcome()
    assert outcome.diagnoses.keys() == {"n=1"}
    assert outcome.diagnosis is None


def test_a_death_keeps_what_the_rank_imported_and_its_excuse() -> None:
    run = Steps()
    run.feature.excuse = "as expected"
    run.take(0, Collecting("test_a.py"), DEAD)
    death = Died(-9, "", 0.0, importing="test_a.py")
    assert (run.outcomes[0].fate, run.outcomes[0].excuse) == (death, "as expected")
    assert run.feature.calls == [("died", 0, death)]
    run.take(1, Collecting("test_a.py"), ItemStarted(), FINISHED, DEAD)
    assert (run.outcomes[1].fate, run.outcomes[1].excuse) == (FINISHED, "")
    assert len(run.feature.calls) == 1
    run = Steps()
    run.take(0, DEAD)
    assert (run.outcomes[0].fate, run.outcomes[0].excuse) == (DEAD, "")


def test_where_all_ranks_have_died_no_death_is_excused() -> None:
    run = Steps()
    run.feature.excuse = "as expected"
    run.take(0, DEAD)
    run.take(1, FINISHED)
    assert run._outcome().ranks[0].excuse == "as expected"
    run.outcomes[1].fate = DEAD
    assert [rank.excuse for rank in run._outcome().ranks] == ["", ""]


def test_a_signal_goes_to_a_process_that_lives() -> None:
    run = Steps()
    assert run.signal(1, 10)
    assert (run.ranks[0].signals, run.ranks[1].signals) == ([], [10])
    run.ranks[1].died = DEAD  # type: ignore[assignment]
    assert run.signal(1, 10) is False
    assert run.ranks[1].signals == [10]
    run.send(0, Part("mine", 1))
    assert (run.ranks[0].sent, run.ranks[1].sent) == ([Part("mine", 1)], [])


def test_a_loop_begins_with_the_order_and_ends_with_the_last_rank() -> None:
    run = Steps()
    seen: list[str] = []
    names = ("pytest_ranks_run_begins", "pytest_ranks_run_ended")
    plugin = SimpleNamespace(
        pytest_ranks_run_begins=pytest.hookimpl(lambda run: seen.append(f"{names[0]} {len(run.outcomes)}")),
        pytest_ranks_run_ended=pytest.hookimpl(lambda run: seen.append(names[1])),
    )
    manager = PluginManager("pytest")
    manager.add_hookspecs(feature_hooks)
    manager.register(plugin)
    run._hook = manager.hook
    for rank in run.ranks:
        rank.wire, own = multiprocessing.Pipe()
        own.send(FINISHED)
        rank.sources = lambda rank=rank: (rank.wire,)  # type: ignore[method-assign, misc]
        rank.read = lambda source: [source.recv()]  # type: ignore[attr-defined]
    del run._handles, run._probes
    run.outcomes = ()
    run.ranks[1].host = "far"
    run.clock.timeout = math.inf
    run.clock.restart()
    handles: Any = run.ranks
    outcome = ItemRun.run(run, handles)
    assert [rank.host for rank in outcome.ranks] == ["", "far"]
    assert seen == [f"{names[0]} 2", names[1]]
    assert run.sent(RunItem) == [[ORDER]] * 2
    assert [rank.fate for rank in outcome.ranks] == [FINISHED] * 2
