"""One rank's run of one example, up to the moment at which it tells the others."""

from __future__ import annotations

import pickle
import unittest
import weakref
from collections.abc import Callable, Sequence

import pytest
from hypothesis.errors import StopTest, UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData, Status
from hypothesis.internal.escalation import get_trimmed_traceback

from harness.properties.crashed import CrashGuard
from harness.properties.messages import ExampleResult, RunningExampleFile
from harness.properties.origin import origin_of
from harness.properties.recorder import Recorder
from harness.protocol import BROKEN_CONNECTION, Vote

__hypothesistracebackhide__ = True  # our frames are no news in a failure's traceback

# Of an example's data: what its structure consists of, as far as the engine goes by it. Releases of
# Hypothesis call the first by either name.
_STRUCTURE = (
    "nodes",
    "_nodes",
    "_nodes_tuple",
    "length",
    "depth",
    "max_depth",
    "has_discards",
    "labels_for_structure_stack",
    "tags",
    "arg_spans",
    "misaligned_at",
    "status",
    "frozen",
    "_ConjectureData__span_record",
    "_ConjectureData__spans",
    "_ConjectureData__result",
)


class Attempt:
    """An example under way.

    Attributes:
        error: What it has raised.
        result: What it has returned.
    """

    def __init__(self, data: ConjectureData, running: RunningExampleFile, lost: CrashGuard) -> None:
        self.data = data
        self.error: BaseException | None = None
        self.result: object = None
        self.recorder = Recorder(data, running, lost)

    def run(self, function: Callable[[ConjectureData], object]) -> None:
        """Draw, run the body, keep what comes of it.

        Raises:
            KeyboardInterrupt, pytest.exit.Exception: nothing is to go on.
        """
        __tracebackhide__ = True
        try:
            self.result = function(self.data)
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except BaseException as error:
            self.error = error.with_traceback(get_trimmed_traceback(error))
        self._forget_values()

    def _forget_values(self) -> None:
        """Forget drawn objects: those alive steer shrinking, and a traceback on one rank keeps some alive."""
        record = self.data._ConjectureData__span_record  # type: ignore[attr-defined]
        values = getattr(record, "span_values", {})
        for place in [place for place, value in values.items() if isinstance(value, weakref.ref)]:
            del values[place]

    def vote(self, case: str, seconds: float) -> Vote:
        outcome, reason = self._outcome()
        mine = ExampleResult(
            self.recorder.digest(),
            seconds,
            dict(self.data.draw_times),
            dict(self.data.target_observations),
            origin_of(self.error) if outcome == "failed" and self.error is not None else None,
            BROKEN_CONNECTION.search(str(self.error)) is not None if outcome == "failed" else False,
        )
        return Vote(case, outcome, reason, mine.pack(), renews_deadline=True)

    def _outcome(self) -> tuple[str, str]:
        match self.error:
            case None:
                return "passed", ""
            case StopTest() if self.data.status == Status.OVERRUN:
                return "gave up", "it draws too much"
            case StopTest():
                return "rejected", str(self.data.events.get("gave up because", ""))
            case UnsatisfiedAssumption():
                return "rejected", str(self.error.reason or "")
            case pytest.skip.Exception() | unittest.SkipTest():
                return "skipped", str(self.error)
        return "failed", ""

    # What the engines must know alike

    def keep(self) -> bytes:
        """Return what other ranks need to take this example over."""
        attributes = {name: vars(self.data)[name] for name in _STRUCTURE if name in vars(self.data)}
        attributes |= {"_ConjectureData__spans": None, "_ConjectureData__result": None}
        state = self.data._random.getstate() if self.data._random is not None else None
        # As bytes, so that the controller, which passes it on, need not import Hypothesis to read it.
        return pickle.dumps((self.recorder.events, attributes, state))

    def take_over(self, kept: bytes) -> None:
        """Let this example have drawn what another rank's has drawn, and have been stopped there."""
        self.recorder.events, attributes, state = pickle.loads(kept)
        for name, value in attributes.items():
            setattr(self.data, name, value)
        self.recorder.reopen()
        if state is not None and self.data._random is not None:
            self.data._random.setstate(state)

    def share(self, told: Sequence[ExampleResult]) -> None:
        """Take the times of the slowest rank, which health checks go by, and the best of all targets."""
        slowest = max(told, key=lambda each: sum(each.draw_times.values()))
        self.data.draw_times = dict(slowest.draw_times)
        targets = self.data.target_observations
        for each in told:
            for label, value in each.targets.items():
                targets[label] = max(value, targets.get(label, value))
