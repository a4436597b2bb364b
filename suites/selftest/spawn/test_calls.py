"""Calls of spawn that are adopted, without ranks: where they run, what they raise, how long they have."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lockstep.bounds import MOST_PROCESSES
from lockstep.controller.requests import Request
from lockstep.exceptions import WorldError
from lockstep.features.spawn import deadline
from lockstep.features.spawn.deadline import Deadline, Limits
from lockstep.features.spawn.hang import REPORT, failed_by_hang
from lockstep.features.spawn.messages import EXIT_CODE, FEATURE, TRACEBACK
from lockstep.features.spawn.pickling import pickle_alone
from lockstep.features.spawn.worlds import PRINTED, Spawn, SpawnOnWorlds, _exception_of, _failure_of
from lockstep.protocol import REPORT_PARTS, Finished, Part, RankStatus
from lockstep.specification import WorldKey
from lockstep.world.clock import Clock
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

STATUS = RankStatus("", "x.py:1 in f")


def config_of(timeout: float = 60.0, **ini: str) -> Any:
    given = {"ranks_adopt_spawn": "worlds", "ranks_leaks": "warn"} | ini
    options = {"world_timeout": timeout, "ranks_adopt_report": True}
    return SimpleNamespace(getini=given.get, getoption=options.get)


def item_of(*fixtures: str, mark: object = None) -> Any:
    warned: list[Any] = []
    return SimpleNamespace(
        path=Path("test_x.py"),
        fixturenames=fixtures,
        get_closest_marker=lambda name: mark if name == "own_processes" else None,
        stash=pytest.Stash(),
        warn=warned.append,
        warned=warned,
    )


def spawn_on(run: Callable[..., Any] = print, **ini: str) -> SpawnOnWorlds:
    return SpawnOnWorlds(config_of(**ini), run, set)


def failing(rank: int = 0, data: dict[str, Any] | None = None, fate: Any = None) -> RankOutcome:
    reports = [] if data is None else [{REPORT_PARTS: {}}, {REPORT_PARTS: {FEATURE: data}}]
    return RankOutcome(rank, reports, fate=fate or Finished(True, 0, 0))


def outcome_of(*ranks: RankOutcome, timed_out: bool = False, blame: tuple[int, ...] = ()) -> ItemOutcome:
    diagnosis = Diagnosis("x", frozenset(blame), is_hopeless=True) if blame else None
    pids = {rank.rank: 100 + rank.rank for rank in ranks}
    return ItemOutcome(ranks, 1.0, timed_out, 1.0, diagnosis=diagnosis, parts={FEATURE: pids})


def report(failed: bool = True, rank: str = "", sections: tuple[tuple[str, str], ...] = ()) -> Any:
    return SimpleNamespace(
        failed=failed, longreprtext=" bad\nmore\n", sections=[*sections], user_properties=[("rank", rank)]
    )


@pytest.mark.parametrize(
    ("spawn", "why"),
    [
        (Spawn(print), ""),
        (Spawn(print, nprocs=MOST_PROCESSES), ""),
        (Spawn(print, nprocs=0), "nprocs=0"),
        (Spawn(print, nprocs=MOST_PROCESSES + 1), f"nprocs={MOST_PROCESSES + 1}"),
        (Spawn(print, join=False), "the test has to do with the processes itself"),
        (Spawn(print, daemon=True), "the test has to do with the processes itself"),
        (Spawn(print, start_method="fork"), "the test has to do with the processes itself"),
    ],
)
def test_a_plain_call_alone_runs_on_a_world(spawn: Spawn, why: str) -> None:
    assert spawn_on().why_not(item_of("tmp_path"), spawn) == why


def test_a_test_may_need_processes_of_its_own() -> None:
    own = "processes of its own are asked for"
    assert spawn_on(ranks_adopt_spawn="processes").why_not(item_of(), Spawn(print)) == own
    assert spawn_on().why_not(item_of(mark=object()), Spawn(print)) == own
    for name in ("capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys"):
        reads = f"the test reads what processes print ({name})"
        assert spawn_on().why_not(item_of("tmp_path", name), Spawn(print)) == reads


def test_a_call_on_another_thread_or_in_a_call_starts_processes() -> None:
    tested, found = spawn_on(), []
    thread = threading.Thread(
        target=lambda: found.append(tested.why_not(item_of(), Spawn(print))), daemon=True
    )
    thread.start()
    thread.join()
    assert found == ["called on another thread"]

    def run(*_: object) -> None:
        found.append(inner.why_not(item_of(), Spawn(print)))
        raise WorldError("no room\nmore")

    inner = spawn_on(run)
    assert inner.run(item_of(), Spawn(print), None) == ("no room", None)  # type: ignore[arg-type]
    assert found == ["called on another thread"] * 2
    assert inner.why_not(item_of(), Spawn(print)) == ""


def test_a_call_is_ordered_on_a_world_without_a_group() -> None:
    asked: list[Any] = []

    def run(*given: Any) -> Any:
        asked.extend(given)
        order = SimpleNamespace(parts={FEATURE: given[3][FEATURE]})
        tested.pytest_ranks_outcome(SimpleNamespace(order=SimpleNamespace(parts={})), "other")  # type: ignore[arg-type]
        tested.pytest_ranks_outcome(SimpleNamespace(order=order), outcome_of(failing()))  # type: ignore[arg-type]
        return "", []

    tested, item = spawn_on(run), item_of()
    assert tested.run(item, Spawn(print, (1,), nprocs=3), None) == ("", None)  # type: ignore[arg-type]
    assert asked[:3] == [item, Request(WorldKey(3, "gloo", "cpu", has_group=False), False, 60.0), None]
    call = asked[3][FEATURE]
    assert (call.name, call.data) == ("print", pickle_alone((print, (1,))))
    assert (call.directory, call.argv, call.environ) == (os.getcwd(), sys.argv, dict(os.environ))
    why, raised = tested.run(item, Spawn(lambda: None), None)  # type: ignore[arg-type]
    assert (why[:50], raised) == ("an argument cannot be sent to a running process: C", None)


@pytest.mark.parametrize(("reports", "why"), [([report(False), report()], "bad"), ([], "no rank has run it")])
def test_a_file_that_ranks_cannot_run_is_remembered(reports: list[Any], why: str) -> None:
    def run(*_: object) -> Any:
        tested._outcome = ItemOutcome((), 1.0, False, 1.0)
        return "", reports

    tested = spawn_on(run)
    assert tested.run(item_of(), Spawn(print), None) == (why, None)  # type: ignore[arg-type]
    assert tested.why_not(item_of(), Spawn(print)) == why
    other = item_of()
    other.path = Path("test_other.py")
    assert tested.why_not(other, Spawn(print)) == ""


def test_what_ranks_printed_is_kept_once() -> None:
    item, sections = item_of(), (("out", "1"), ("err", "2"))
    item.stash[PRINTED] = [("out", "1")]
    shown = [report(False, sections=sections), report(False, sections=sections)]
    assert spawn_on()._conclude(item, outcome_of(failing()), shown) is None
    assert item.stash[PRINTED] == [*sections]
    assert item.warned == []


def test_what_a_spawned_function_leaves_is_a_warning_or_a_failure() -> None:
    item, reports = item_of(), [report(False), report()]
    assert spawn_on()._conclude(item, outcome_of(failing()), reports) is None
    assert [str(each) for each in item.warned] == ["the spawned function bad\nmore"]
    error = spawn_on(ranks_leaks="error")._conclude(item, outcome_of(failing()), reports)
    assert isinstance(error, pytest.fail.Exception)
    assert (error.msg, error.pytrace, len(item.warned)) == (" bad\nmore\n", False, 1)


def test_only_a_rank_that_is_stuck_at_the_deadline_is_a_hang() -> None:
    conclude, stuck = spawn_on()._conclude, failing(1, fate=Stuck(STATUS, 0.0))
    hung = conclude(item_of(), outcome_of(failing(), stuck, timed_out=True), [report()])
    assert isinstance(hung, pytest.fail.Exception)
    assert hung.msg == " bad"
    for outcome in (outcome_of(failing(), stuck), outcome_of(failing(0, {EXIT_CODE: 3}), timed_out=True)):
        bad = report()
        error = conclude(item_of(), outcome, [bad])
        assert isinstance(error, ProcessExitedException)
        assert vars(error)[REPORT] is bad
    assert str(failed_by_hang(None)) == "the processes hang"
    assert vars(failed_by_hang(None)) | {REPORT: 1} != {REPORT: 1}


@pytest.mark.parametrize(
    ("rank", "failure"),
    [
        (failing(), None),
        (failing(fate=Died(None, "", 0.0)), {EXIT_CODE: 1}),
        (failing(fate=Died(5, "", 0.0)), {EXIT_CODE: 5}),
        (failing(fate=Stuck(STATUS, 0.0)), {EXIT_CODE: -9}),
        (failing(0, {TRACEBACK: "x"}), {TRACEBACK: "x"}),
    ],
)
def test_a_rank_fails_by_its_fate_or_its_report(rank: RankOutcome, failure: object) -> None:
    assert _failure_of(rank) == failure


@pytest.mark.parametrize(
    ("blame", "named", "index"),
    [((), "", 1), ((), "0, 2", 2), ((2,), "1", 2), ((0,), "1", 1), ((3, 2), "", 2)],
)
def test_the_exception_is_that_of_the_rank_to_blame(blame: tuple[int, ...], named: str, index: int) -> None:
    ranks = (failing(0), failing(1, {EXIT_CODE: 4}), failing(2, {EXIT_CODE: 4}), failing(3, {EXIT_CODE: 4}))
    error: Any = _exception_of(outcome_of(*ranks, blame=blame), report(rank=named))
    assert (error.error_index, error.error_pid, error.exit_code) == (index, 100 + index, 4)
    assert str(error) == f"process {index} terminated with exit code 4"


@pytest.mark.parametrize(
    ("failure", "kind", "text", "signal"),
    [
        ({EXIT_CODE: 0}, ProcessExitedException, "process 0 terminated with exit code 0", None),
        ({EXIT_CODE: -9}, ProcessExitedException, "process 0 terminated with signal SIGKILL", "SIGKILL"),
        (
            {EXIT_CODE: -99},
            ProcessExitedException,
            "process 0 terminated with signal <Unknown signal 99>",
            "<Unknown signal 99>",
        ),
        (
            {TRACEBACK: "of rank"},
            ProcessRaisedException,
            "\n\n-- Process 0 terminated with the following error:\nof rank",
            None,
        ),
    ],
)
def test_the_exception_has_the_words_of_torch(
    failure: dict[str, Any], kind: type, text: str, signal: str | None
) -> None:
    outcome = ItemOutcome((failing(0, failure),), 1.0, False, 1.0, parts={FEATURE: {}})
    error: Any = _exception_of(outcome, report())
    assert (type(error), str(error), error.error_pid) == (kind, text, -1)
    assert getattr(error, "signal_name", None) == signal


def test_the_deadline_of_a_call_follows_what_its_processes_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[set[int]] = []
    tested = SpawnOnWorlds(config_of(), print, lambda: {7})
    run: Any = SimpleNamespace(order=SimpleNamespace(parts={FEATURE: 1}), parts={}, clock=Clock(60))
    other: Any = SimpleNamespace(order=SimpleNamespace(parts={}), parts={}, clock=Clock(60))
    tested.pytest_ranks_run_begins(other)
    tested.pytest_ranks_probe(other)
    tested.pytest_ranks_run_begins(run)
    tested.pytest_ranks_message(run, 1, Part("other", 11))
    tested.pytest_ranks_message(run, 1, Part(FEATURE, 12))
    assert run.parts == {FEATURE: {1: 12}}
    assert tested._deadline._pids() == {7, 12}
    monkeypatch.setattr(tested, "_deadline", SimpleNamespace(moment=lambda: 5.0, seconds=lambda: 61.234))
    run.clock.importing = {0: "x"}
    tested.pytest_ranks_probe(run)
    assert run.clock.timeout == 60
    run.clock.importing = {}
    tested.pytest_ranks_probe(run)
    assert (run.clock.deadline, run.clock.timeout, pids) == (5.0, 61.2, [])


def test_a_deadline_that_no_one_has_set_is_remarked_on() -> None:
    outcome = outcome_of(failing(), timed_out=True)

    def remarks(outcome: ItemOutcome, timeout: float = 60.0) -> object:
        context: Any = SimpleNamespace(outcome=outcome)
        return SpawnOnWorlds(config_of(timeout), print, set).pytest_ranks_remarks(context)

    assert remarks(outcome) == [
        "a call of spawn has 60 s while none of its processes computes, and 300 s in all; --world-timeout "
        "sets another limit"
    ]
    assert remarks(outcome, 8.0) == remarks(outcome_of(failing())) == ()
    assert remarks(ItemOutcome((), 1.0, True, 1.0)) == ()


def test_a_deadline_looks_once_a_second_and_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 100.0, 0

    def computed(pids: set[int]) -> float:
        nonlocal looks
        looks += 1
        return 10.0 * looks

    monkeypatch.setattr(deadline.time, "monotonic", lambda: now)
    monkeypatch.setattr(deadline, "processor_time", computed)
    tested, fixed = Deadline(Limits(60, 300), set), Deadline(Limits(60, 60), set)
    found = []
    for now in (100.5, 101.0, 101.5, 102.0, 103.5):  # noqa: B007
        found.append((tested.moment(), looks))
        assert fixed.moment() == 160
    assert found == [(160, 0), (160, 1), (160, 1), (162, 2), (163.5, 3)]
    assert tested.seconds() == 63.5
    assert [Limits.read(config_of(each)) for each in (60.0, 8.0)] == [Limits(60, 300), Limits(8, 8)]
