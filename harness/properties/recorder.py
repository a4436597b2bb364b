"""What an example draws, held back from the engine until the ranks have agreed on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from hypothesis.database import choices_to_bytes
from hypothesis.internal.conjecture.data import ConjectureData, DataObserver, Status

from harness.output import truncate
from harness.properties.crashed import CrashGuard
from harness.properties.messages import Drawn, RunningExampleFile

MOST_OF_A_VALUE = 80
"""Characters of a drawn value that a message shows."""
_KILL = "kill"


class Recorder(DataObserver):
    """Takes the place of the engine's observer of one example.

    The engine's own remembers for good what it sees. It must not see what one rank alone has drawn.
    """

    def __init__(self, data: ConjectureData, running: RunningExampleFile, lost: CrashGuard) -> None:
        self._data = data
        self._running = running
        self._check = lost.check if lost.is_expected else None
        self._observer = data.observer
        self.events: list[Any] = []
        self._conclusion: tuple[Any, ...] | None = None
        data.observer = self

    def draw_integer(self, value: Any, *, constraints: Any, was_forced: bool) -> None:
        self._note("integer", value, constraints, was_forced)

    def draw_float(self, value: Any, *, constraints: Any, was_forced: bool) -> None:
        self._note("float", value, constraints, was_forced)

    def draw_string(self, value: Any, *, constraints: Any, was_forced: bool) -> None:
        self._note("string", value, constraints, was_forced)

    def draw_bytes(self, value: Any, *, constraints: Any, was_forced: bool) -> None:
        self._note("bytes", value, constraints, was_forced)

    def draw_boolean(self, value: Any, *, constraints: Any, was_forced: bool) -> None:
        self._note("boolean", value, constraints, was_forced)

    def _note(self, kind: str, value: Any, constraints: Any, was_forced: bool) -> None:
        if self._check is not None:
            self._check()
        self._running.draw(choices_to_bytes((value,)))
        self.events.append((kind, value, constraints, was_forced, len(self._data.draw_times)))

    def kill_branch(self) -> None:
        self.events.append((_KILL, None, {}, False, 0))

    def conclude_test(self, status: Status, interesting_origin: Any) -> None:
        self._conclusion = (status, interesting_origin)

    def digest(self) -> bytes:
        """Return what is equal if the same values were drawn in the same bounds, and the structure is one."""
        said: list[object] = [(event[0], event[1], *_bounds(event[2])) for event in self.events]
        record = self._data._ConjectureData__span_record  # type: ignore[attr-defined]
        said.append((len(record.trail), self._data.depth, self._data.frozen))
        return hashlib.blake2b(repr(said).encode(errors="surrogatepass"), digest_size=16).digest()

    def describe(self) -> list[Drawn]:
        """Return what was drawn in words."""
        names = [name.removeprefix("generate:") for name in self._data.draw_times]
        return [_describe(event, names) for event in self.events if event[0] != _KILL]

    def reopen(self) -> None:
        """Forget that the example has ended."""
        self._conclusion = None

    def hand_over(self) -> None:
        """Let the engine's observer see what it would have seen; it may raise that the test is flaky."""
        self._data.observer = self._observer
        for kind, value, constraints, was_forced, _ in self.events:
            if kind == _KILL:
                self._observer.kill_branch()
            else:
                draw = getattr(self._observer, f"draw_{kind}")
                draw(value, constraints=constraints, was_forced=was_forced)
        if self._conclusion is not None:
            self._observer.conclude_test(*self._conclusion)


def _bounds(constraints: dict[str, Any]) -> Iterable[Any]:
    """Return the numbers among a draw's constraints: its alphabet or its weights are long to write."""
    return (value for value in constraints.values() if value is None or isinstance(value, int | float))


def _describe(event: Any, names: list[str]) -> Drawn:
    kind, value, constraints, _, place = event
    low, high = constraints.get("min_value"), constraints.get("max_value")
    bounds = f" of {low} to {high}" if kind == "integer" and low is not None and high is not None else ""
    where = names[place] if place < len(names) else ""
    return Drawn(f"{truncate(repr(value), MOST_OF_A_VALUE)} ({kind}{bounds})", where)
