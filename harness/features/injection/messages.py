"""Messages between the two halves of injected faults. Both sides; must not import torch."""

from __future__ import annotations

from dataclasses import dataclass

FEATURE = "injection"


@dataclass(frozen=True, slots=True)
class Expects:
    """The rank enters `faults.expect`: a death in it is no failure if its sentence contains the text."""

    text: str
    within: float
    """Seconds for which ranks have to stand still, where one that hangs is expected."""


@dataclass(frozen=True, slots=True)
class FaultHit:
    """A fault that the test has injected has met its collective."""

    text: str
    """Sentence with the rank, what happened to it, and where."""
    at: float
    """Wall-clock time."""


@dataclass(frozen=True, slots=True)
class NewExample:
    """The rank begins another example of a property test; faults that have struck it are not of that."""


@dataclass(frozen=True, slots=True)
class LeavesByError:
    """The rank leaves `faults.expect` by an error, and closes its connections."""


FromRank = Expects | FaultHit | NewExample | LeavesByError
"""To ranks goes the number of one that has died inside of `faults.expect`, or has left it by an error."""


@dataclass(frozen=True, slots=True)
class EndOfBlock:
    """A part of a vote: the rank has come to the end of a `faults.expect`."""

    at: float
    """Wall-clock time."""


@dataclass(frozen=True, slots=True)
class Happened:
    """A death or a failure of a rank inside of `faults.expect`, as a sentence."""

    rank: int
    text: str
    at: float
    """Wall-clock time; of an injected fault, that at which it struck."""
