"""Values sent about examples, and the file in which a rank records its example.

Both sides import this; standard library only.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from dataclasses import dataclass, field

FEATURE = "properties"

# Names of what ranks add to pytest's reports.
CRASHED = "lockstep_crashed_example"
"""Index, among the examples that ended a world, of the one that the report is about."""
NOTES = "lockstep_example"
"""Hypothesis's description of the failing example."""
STATISTICS = "_hypothesis_stats"
"""Key under which Hypothesis's plugin reads them (`_hypothesis_pytestplugin`, seen in 6.170)."""


@dataclass(frozen=True, slots=True)
class RunningExample:
    """The example of a property test that a rank is in.

    The same example has the same choices in any world that runs the same test.
    """

    run: int
    """Number of its property in the test, from 1."""
    number: int
    """Number of the example in the run, from 1."""
    choices: bytes
    is_in_body: bool
    """True if the arguments were drawn; choices that a body draws itself come after."""

    def is_same(self, other: RunningExample) -> bool:
        """Return whether the other is at the same moment; without choices it is compared by number."""
        same = (self.run, self.choices, self.is_in_body) == (other.run, other.choices, other.is_in_body)
        return same and (bool(self.choices) or self.number == other.number)


@dataclass(frozen=True, slots=True)
class CrashedExample:
    """An example that ended its world: a rank died or hung in it."""

    example: RunningExample
    how: str
    """Rank, and what happened to it, in words."""


# Sent with each test, and without slots: see `RunItem`.
@dataclass(frozen=True)
class Search:
    """The input that all ranks need equally to search for a failing example in step."""

    entropy: int = 0
    """Seed of Hypothesis's own seeds."""
    crashed: tuple[CrashedExample, ...] = ()
    """The examples that ended a world each in earlier runs of this test."""
    continues: bool = True
    """True to look for a smaller example once the last of these has come up."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Identity of a bug: the exception, and the line that raised it."""

    text: str
    """All of it, the exceptions that were being handled included."""
    exception: str
    filename: str | None
    lineno: int | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """One choice of an example, in words."""

    value: str
    """`7 (integer of 0 to 9)`"""
    where: str
    """The argument or the draw that it belongs to: `x`, `Draw 2 (steps)`."""


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """Everything one rank sends about an example, besides its outcome."""

    choices: bytes
    """A digest of what was drawn."""
    seconds: float
    """Seconds by this rank's clock."""
    draw_times: dict[str, float] = field(default_factory=dict)
    """Seconds by draw."""
    targets: dict[str, float] = field(default_factory=dict)
    """Observations of `hypothesis.target`, by label."""
    origin: Origin | None = None
    """Identity of its failure."""
    lost_connection: bool = False
    """True if the failure is a broken connection: another rank failed first."""

    def pack(self) -> bytes:
        """Return what `unpack` reads: bytes, which pass through the controller at little cost."""
        fields = self.choices, self.seconds, self.draw_times, self.targets, self.origin, self.lost_connection
        return pickle.dumps(fields)

    @classmethod
    def unpack(cls, packed: bytes) -> ExampleResult:
        return cls(*pickle.loads(packed))


SIZE = 256 * 1024
"""Bytes of the file: Hypothesis limits an example to 8 KiB of choices, each some bytes longer here."""
_HEADER = struct.Struct("<BBIII")


class RunningExampleFile:
    """The file in which a rank records its example, for the case that it dies in it.

    The file is mapped into memory: the kernel keeps what was written whatever happens to the process, and a
    draw costs no system call.
    """

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
        """Append a choice. One that does not fit is left out: the record is of no use then."""
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
    if len(content) < _HEADER.size or not content[0]:
        return None
    _, is_in_body, run, number, length = _HEADER.unpack_from(content)
    return RunningExample(run, number, content[_HEADER.size : _HEADER.size + length], bool(is_in_body))
