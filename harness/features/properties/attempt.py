"""One rank's run of one example, up to its vote. Runs inside a rank."""

from __future__ import annotations

import hashlib
import pickle
import unittest
from collections.abc import Callable, Iterable, Sequence
from functools import partialmethod
from typing import Any

import pytest
from hypothesis.errors import StopTest, UnsatisfiedAssumption

from lockstep.backends import BROKEN_CONNECTION
from lockstep.features.properties.crashed import CrashGuard
from lockstep.features.properties.hypothesis_internals import (
    ConjectureData,
    DataObserver,
    Status,
    choices_to_bytes,
    count_spans,
    forget_drawn_objects,
    get_trimmed_traceback,
    origin_of,
    restore_structure,
    structure_of,
)
from lockstep.features.properties.messages import Drawn, ExampleResult, RunningExampleFile
from lockstep.output import truncate
from lockstep.protocol import Vote

__hypothesistracebackhide__ = True  # frames of ours do not belong into a failure's traceback

MAX_VALUE = 80
"""Characters of a drawn value that a message shows."""
_KILL = "kill"

Body = Callable[[ConjectureData], object]
Runner = Callable[[ConjectureData, Body], object]


class Attempt:
    """One execution of an example.

    Attributes:
        error: The exception it raised.
        result: The value it returned.
    """

    def __init__(self, data: ConjectureData, running: RunningExampleFile, guard: CrashGuard) -> None:
        self.data = data
        self.error: BaseException | None = None
        self.result: object = None
        self.recorder = DrawRecorder(data, running, guard)

    def run(self, runner: Runner, function: Body) -> None:
        """Draw, run the body, keep its result or exception.

        Raises:
            KeyboardInterrupt, pytest.exit.Exception: the run is to end.
        """
        __tracebackhide__ = True
        try:
            self.result = runner(self.data, function)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:
            self.error = error.with_traceback(get_trimmed_traceback(error))
        forget_drawn_objects(self.data)

    def vote(self, case: str, seconds: float) -> Vote:
        outcome, reason = self._outcome()
        failure = self.error if outcome == "failed" else None
        result = ExampleResult(
            self.recorder.digest(),
            seconds,
            dict(self.data.draw_times),
            dict(self.data.target_observations),
            origin=None if failure is None else origin_of(failure),
            lost_connection=failure is not None and BROKEN_CONNECTION.search(str(failure)) is not None,
        )
        return Vote(case, outcome, reason, result.pack(), renews_deadline=True)

    def _outcome(self) -> tuple[str, str]:
        match self.error:
            case None:
                return "passed", ""
            case StopTest() if self.data.status == Status.OVERRUN:
                return "gave up on", "too much data drawn"
            case StopTest():
                return "rejected", str(self.data.events.get("gave up because", ""))
            case UnsatisfiedAssumption():
                return "rejected", str(self.error.reason or "")
            case pytest.skip.Exception() | unittest.SkipTest():
                return "skipped", str(self.error)
        return "failed", ""

    def keep(self) -> bytes:
        """Return the draws of this example, for the ranks that take it over."""
        # Bytes, so that the controller, which passes them on, need not import Hypothesis to read them.
        return pickle.dumps((self.recorder.events, structure_of(self.data)))

    def take_over(self, kept: bytes) -> None:
        """Replace the draws of this example by those that another rank has kept, up to where it stopped."""
        self.recorder.events, structure = pickle.loads(kept)
        self.recorder.conclusion = None
        restore_structure(self.data, structure)

    def share(self, results: Sequence[ExampleResult]) -> None:
        """Take the draw times of the slowest rank, which health checks read, and the best of all targets."""
        slowest = max(results, key=lambda result: sum(result.draw_times.values()))
        self.data.draw_times = dict(slowest.draw_times)
        targets = self.data.target_observations
        for result in results:
            for label, value in result.targets.items():
                targets[label] = max(value, targets.get(label, value))


class DrawRecorder(DataObserver):
    """Records the draws of one example in place of the engine's observer, until all ranks have voted.

    The engine's observer builds a tree of all draws for good: it must not see draws of one rank alone.
    """

    def __init__(self, data: ConjectureData, running: RunningExampleFile, guard: CrashGuard) -> None:
        self._data = data
        self._running = running
        self._check = guard.check if guard.is_expected else None
        self._observer = data.observer
        self.events: list[Any] = []
        self.conclusion: tuple[Any, ...] | None = None
        data.observer = self

    def _record(self, kind: str, value: Any, *, constraints: Any, was_forced: bool) -> None:
        if self._check is not None:
            self._check()
        self._running.draw(choices_to_bytes((value,)))
        self.events.append((kind, value, constraints, was_forced, len(self._data.draw_times)))

    draw_integer = partialmethod(_record, "integer")
    draw_float = partialmethod(_record, "float")
    draw_string = partialmethod(_record, "string")
    draw_bytes = partialmethod(_record, "bytes")
    draw_boolean = partialmethod(_record, "boolean")

    def kill_branch(self) -> None:
        self.events.append((_KILL, None, {}, False, 0))

    def conclude_test(self, status: Status, interesting_origin: Any) -> None:
        self.conclusion = (status, interesting_origin)

    def digest(self) -> bytes:
        """Return a digest of the values drawn, of their bounds, and of the structure of the example."""
        parts: list[object] = [(event[0], event[1], *_bounds(event[2])) for event in self.events]
        parts.append((count_spans(self._data), self._data.depth, self._data.frozen))
        return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).digest()

    def describe(self) -> list[Drawn]:
        """Return the draws in words."""
        names = dict(enumerate(name.removeprefix("generate:") for name in self._data.draw_times))
        drawn = []
        for kind, value, constraints, _, place in self.events:
            low, high = constraints.get("min_value"), constraints.get("max_value")
            bounds = f" of {low} to {high}" if kind == "integer" and None not in (low, high) else ""
            if kind != _KILL:
                words = f"{truncate(repr(value), MAX_VALUE)} ({kind}{bounds})"
                drawn.append(Drawn(words, names.get(place, "")))
        return drawn

    def hand_over(self) -> None:
        """Replay the draws to the engine's observer, which may raise that the test is flaky."""
        self._data.observer = self._observer
        for kind, value, constraints, was_forced, _ in self.events:
            if kind == _KILL:
                self._observer.kill_branch()
            else:
                draw = getattr(self._observer, f"draw_{kind}")
                draw(value, constraints=constraints, was_forced=was_forced)
        if self.conclusion is not None:
            self._observer.conclude_test(*self.conclusion)


def _bounds(constraints: dict[str, Any]) -> Iterable[Any]:
    """Return the numbers among a draw's constraints: its alphabet or its weights are long to write."""
    return (value for value in constraints.values() if value is None or isinstance(value, int | float))
