"""What ranks tell each other of an example. Both sides load this; standard library only."""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from dataclasses import dataclass, field
from typing import Protocol

from harness.protocol import RankSpec, RunningExample, Vote

EXAMPLE = "example "
"""How the case of an example begins. Cases of `run_subtests` read `key=value`."""
VICTIM_OF_AN_EXAMPLE = "this example failed on another rank: "
"""How a rank's failure begins when the rank itself had no quarrel with the example."""
LEFT = "had already ended the test"
"""How it ends if that is all that went wrong."""
HYPOTHESIS = "Hypothesis"
"""The title of what Hypothesis prints. It is the same on all ranks, as a rule, and shown once then."""

# Names of what ranks add to pytest's reports.
CRASHED = "lockstep_crashed_example"
"""Which of the examples that cost a world the report tells of."""
NOTES = "lockstep_example"
"""What Hypothesis says of the failing example."""
SEED = "lockstep_seed"
"""The seed that brings the failure up again, where no database keeps it."""
STATISTICS = "_hypothesis_stats"
"""Hypothesis's own name, under which its plugin looks for them."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What tells one bug from another: the exception, and the line that raised it."""

    text: str
    """All of it, the exceptions that were being handled included."""
    exception: str
    filename: str | None
    lineno: int | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One choice of an example, in words."""

    what: str
    """`7 (integer of 0 to 9)`"""
    where: str
    """The argument or the draw that it belongs to: `x`, `Draw 2 (steps)`."""


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """What one rank tells of an example, beside its outcome."""

    choices: bytes
    """A digest of what was drawn."""
    seconds: float
    """This rank's clock."""
    draw_times: dict[str, float] = field(default_factory=dict)
    """Seconds by draw."""
    targets: dict[str, float] = field(default_factory=dict)
    """What `hypothesis.target` was told, by label."""
    origin: Origin | None = None
    """Of a failure."""
    lost_connection: bool = False
    """Whether the failure is a broken connection: another rank broke off."""

    def pack(self) -> bytes:
        """Return what `unpack` reads: bytes, which pass through the controller at little cost."""
        fields = self.choices, self.seconds, self.draw_times, self.targets, self.origin, self.lost_connection
        return pickle.dumps(fields)

    @classmethod
    def unpack(cls, packed: bytes) -> ExampleResult:
        return cls(*pickle.loads(packed))


@dataclass(frozen=True, slots=True)
class GroupState:
    """In which state a failed example has left the process groups of a rank."""

    is_aborted: bool
    collectives: int
    groups: int


class RankInStep(Protocol):
    """The rank that runs a property test, as far as property tests need it."""

    @property
    def spec(self) -> RankSpec: ...
    def agree(self, vote: Vote, abort_after: float | None = None) -> tuple[Vote, ...]: ...
    def begin_case(self, name: str) -> None: ...
    def groups(self) -> GroupState: ...
    def repair(self) -> None: ...


SIZE = 256 * 1024
"""Bytes of the file: Hypothesis lets an example draw 8 KiB, and a choice takes some bytes more in writing."""
_HEADER = struct.Struct("<BBIII")


class RunningExampleFile:
    """The note as its rank writes it."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._run = self._number = 0
        self._is_in_body = False
        self._end = _HEADER.size

    def begin(self, run: int, number: int) -> None:
        self._run, self._number, self._is_in_body, self._end = run, number, False, _HEADER.size
        self._write_header()

    def enter_body(self) -> None:
        self._is_in_body = True
        self._write_header()

    def draw(self, choice: bytes) -> None:
        """Add a choice. One that finds no room is left out: the note is of no use then."""
        end = self._end + len(choice)
        if end <= SIZE:
            self._memory[self._end : end] = choice
            self._end = end
            self._write_header()

    def end(self) -> None:
        self._memory[0] = 0

    def now(self) -> RunningExample:
        choices = self._memory[_HEADER.size : self._end]
        return RunningExample(self._run, self._number, choices, self._is_in_body)

    def _write_header(self) -> None:
        length = self._end - _HEADER.size
        _HEADER.pack_into(self._memory, 0, 1, self._is_in_body, self._run, self._number, length)


def read_running_example(path: str) -> RunningExample | None:
    """Return the example that a rank is in, or was in when it died; None if it was in none."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    if len(content) < _HEADER.size:
        return None
    is_active, is_in_body, run, number, length = _HEADER.unpack_from(content)
    if not is_active:
        return None
    return RunningExample(run, number, content[_HEADER.size : _HEADER.size + length], bool(is_in_body))
