"""Plain calls of `torch.multiprocessing.spawn`, run on a warm world. Runs in the controller.

Must not import torch: only a test that has done so calls `spawn`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.bounds import MOST_PROCESSES
from lockstep.controller.requests import Request
from lockstep.exceptions import WorldError
from lockstep.features.spawn.child import Server
from lockstep.features.spawn.deadline import Deadline, Limits
from lockstep.features.spawn.hang import REPORT, failed_by_hang
from lockstep.features.spawn.messages import EXIT_CODE, FEATURE, TRACEBACK, Call
from lockstep.features.spawn.pickling import NotAlone, pickle_alone
from lockstep.features.spawn.torch_internals import exited_exception, raised_exception
from lockstep.protocol import REPORT_PARTS
from lockstep.specification import WorldKey
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck

if TYPE_CHECKING:
    from lockstep.protocol import Part
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.item_run import ItemRun

MARK = "own_processes"
"""Mark of tests whose calls of `spawn` start processes."""
PRINTED = pytest.StashKey[list[tuple[str, str]]]()
"""Sections of what the ranks of an item have printed, which no report has yet."""
_READS_OUTPUT = ("capfd", "capfdbinary", "capsys", "capsysbinary", "capteesys")


@dataclass(frozen=True, slots=True)
class Spawn:
    """The arguments of `torch.multiprocessing.start_processes`."""

    function: Callable[..., object]
    args: Sequence[object] = ()
    nprocs: int = 1
    join: bool = True
    daemon: bool = False
    start_method: str = "spawn"


class SpawnOnWorlds:
    """Runs calls of `spawn` on warm worlds.

    Args:
        run: runs an order in an item's place (`Controller.prepare`).
        other_pids: returns processes that tests have started: spawned functions may wait for them.
    """

    def __init__(
        self, config: pytest.Config, run: Callable[..., Any], other_pids: Callable[[], set[int]]
    ) -> None:
        self._config = config
        self._run = run
        self._other_pids = other_pids
        self._outcome: ItemOutcome | None = None
        self._is_running = False
        self._broken: dict[str, str] = {}
        """Reasons why ranks cannot run what is in a file, by its path."""

    def why_not(self, item: pytest.Item, spawn: Spawn) -> str:
        """Return the reason why a call starts processes; "" if it may run on a world."""
        if self._config.getini("ranks_adopt_spawn") == "processes" or item.get_closest_marker(MARK):
            return "processes of its own are asked for"
        if not spawn.join or spawn.daemon or spawn.start_method != "spawn":
            return "the test has to do with the processes itself"
        if self._is_running or threading.current_thread() is not threading.main_thread():
            return "called on another thread"
        if not 1 <= spawn.nprocs <= MOST_PROCESSES:
            return f"nprocs={spawn.nprocs}"
        for name in _READS_OUTPUT:
            if name in getattr(item, "fixturenames", ()):
                return f"the test reads what processes print ({name})"
        return self._broken.get(str(item.path), "")

    def run(self, item: pytest.Item, spawn: Spawn, server: Server) -> tuple[str, BaseException | None]:
        """Run a call on a world.

        Return the reason why it must start processes after all, "" if it has run, and what `spawn` raises.
        """
        try:
            data = pickle_alone((spawn.function, tuple(spawn.args)))
        except NotAlone as reason:
            return str(reason), None
        name = getattr(spawn.function, "__name__", "function")
        call = Call(name, data, dict(os.environ), [*sys.argv], [*sys.path], os.getcwd(), server)
        timeout = Limits.read(self._config).idle
        request = Request(WorldKey(spawn.nprocs, "gloo", "cpu", has_group=False), False, timeout)
        self._is_running, self._outcome = True, None
        try:
            _, reports = self._run(item, request, None, {FEATURE: call})
        except WorldError as error:
            return str(error).splitlines()[0], None
        finally:
            self._is_running = False
        outcome: ItemOutcome | None = self._outcome
        assert outcome is not None, "a run without an outcome"
        if not outcome.parts.get(
            FEATURE
        ):  # no rank has come to the function: a file that cannot be collected
            bad = next((report.longreprtext for report in reports if report.failed), "no rank has run it")
            self._broken[str(item.path)] = why = bad.strip().splitlines()[0]
            return why, None
        return "", self._conclude(item, outcome, reports)

    def _conclude(
        self, item: pytest.Item, outcome: ItemOutcome, reports: list[pytest.TestReport]
    ) -> BaseException | None:
        """Return what `spawn` would raise; pass on what ranks have printed, and left behind."""
        printed = item.stash.setdefault(PRINTED, [])
        for report in reports:
            printed += [section for section in report.sections if section not in printed]
        bad = next((report for report in reports if report.failed), None)
        if bad is None:
            return None
        if outcome.timed_out and any(isinstance(rank.fate, Stuck) for rank in outcome.ranks):
            return failed_by_hang(bad)
        if any(_failure_of(rank) is not None for rank in outcome.ranks):
            return _exception_of(outcome, bad)
        if self._config.getini("ranks_leaks") == "error":
            return pytest.fail.Exception(bad.longreprtext, pytrace=False)
        item.warn(pytest.PytestWarning(f"the spawned function {bad.longreprtext.strip()}"))
        return None

    def pytest_ranks_run_begins(self, run: ItemRun) -> None:
        if FEATURE in run.order.parts:
            self._deadline = Deadline(
                Limits.read(self._config),
                lambda: {*run.parts.get(FEATURE, {}).values()} | self._other_pids(),
            )

    def pytest_ranks_probe(self, run: ItemRun) -> None:
        """Move the deadline while ranks compute."""
        clock = run.clock
        if FEATURE in run.order.parts and not clock.importing:
            clock.deadline = self._deadline.moment()
            clock.timeout = round(self._deadline.seconds(), 1)

    def pytest_ranks_remarks(self, context: Context) -> Sequence[str]:
        """Say which deadline a call has run into that no one has set."""
        outcome, limits = context.outcome, Limits.read(self._config)
        if not (outcome.timed_out and FEATURE in outcome.parts) or limits.idle == limits.total:
            return ()
        within = f"{limits.idle:g} s while none of its processes computes, and {limits.total:g} s in all"
        return [f"a call of spawn has {within}; --world-timeout sets another limit"]

    def pytest_ranks_message(self, run: ItemRun, rank: int, part: Part) -> None:
        """Note the process of a rank that has come to the function."""
        if part.feature == FEATURE:
            run.parts.setdefault(FEATURE, {})[rank] = part.data

    def pytest_ranks_outcome(self, run: ItemRun, outcome: ItemOutcome) -> None:
        if FEATURE in run.order.parts:
            self._outcome = outcome


def _failure_of(rank: RankOutcome) -> Mapping[str, Any] | None:
    """Return how the function failed on a rank, by the keys of `messages`; None where it did not."""
    match rank.fate:
        case Died(exitcode=code):
            return {EXIT_CODE: 1 if code is None else code}
        case Stuck():
            return {EXIT_CODE: -int(signal.SIGKILL)}
    for report in rank.reports:
        if FEATURE in report.get(REPORT_PARTS, {}):
            found: Mapping[str, Any] = report[REPORT_PARTS][FEATURE]
            return found
    return None


def _exception_of(outcome: ItemOutcome, report: pytest.TestReport) -> Exception:
    """Return the exception of `spawn` for the rank to blame, with the report of all of them."""
    named = dict(report.user_properties).get("rank", "")
    to_blame = [int(number) for number in str(named).split(", ") if number]
    failed = [rank.rank for rank in outcome.ranks if _failure_of(rank) is not None]
    if outcome.diagnosis is not None:
        to_blame = [*sorted(outcome.diagnosis.blame), *to_blame]
    index = next((each for each in to_blame if each in failed), failed[0])
    failure, pid = _failure_of(outcome.ranks[index]) or {}, outcome.parts[FEATURE].get(index, -1)
    if failure.get(EXIT_CODE) is not None:
        error = exited_exception(index, pid, failure[EXIT_CODE])
    else:
        error = raised_exception(index, pid, failure[TRACEBACK])
    vars(error)[REPORT] = report
    return error
