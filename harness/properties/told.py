"""What ranks tell each other of an example. Both sides load this; standard library only."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

EXAMPLE = "example "
"""How the point of an example begins. Points of `run_subtests` read `key=value`."""
VICTIM_OF_AN_EXAMPLE = "this example failed elsewhere: "
"""How a rank's failure begins when the rank itself had no quarrel with the example."""
LEFT = "had ended the test by then"
"""How it ends if that is all that went wrong."""
HYPOTHESIS = "Hypothesis"
"""The title of what Hypothesis prints. It is the same on all ranks, as a rule, and shown once then."""

# Names of what ranks add to pytest's reports.
LOST = "lockstep_lost_example"
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
class Told:
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
    is_cut_off: bool = False
    """Whether the failure is a broken connection: another rank broke off."""

    def pack(self) -> bytes:
        """Return what `unpack` reads: bytes, which pass through the controller at little cost."""
        fields = self.choices, self.seconds, self.draw_times, self.targets, self.origin, self.is_cut_off
        return pickle.dumps(fields)

    @classmethod
    def unpack(cls, packed: bytes) -> Told:
        return cls(*pickle.loads(packed))


@dataclass(frozen=True, slots=True)
class Groups:
    """In which state a failed example has left the process groups of a rank."""

    is_severed: bool
    collectives: int
    groups: int
