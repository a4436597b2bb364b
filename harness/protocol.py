"""The messages between a controller and its ranks.

Both sides import this; standard library only. Pytest reports travel in pytest's own serialised form. `parts`
hold what features add, by the name of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.flight_entries import FlightRecord

SKIPS_ALL = "skips_all_ranks"
"""The attribute of a report whose skip is that of all ranks; any other skip of one rank is a disagreement."""
OF_RANKS = "of_ranks"
"""The attribute of a subtest's report that is merged from those of ranks."""
REPORT_PARTS = "ranks_parts"
"""The attribute of a report that holds what features add to it, by the name of each."""
RERUN_OPTIONS = "rerun_options"
"""The attribute of a failure's report that holds options which running the test again needs in addition."""
VICTIM_OF_A_CASE = "this case failed on another rank: "
"""Beginning of a rank's subtest failure when the rank itself passed the case."""
TRIAL = "example "
"""Beginning of a case that is one of a series, and none to select; of `run_subtests` it is `key=value`."""
VICTIM_OF_A_TRIAL = "this example failed on another rank: "
"""Beginning of the failure of a rank that found nothing wrong with the trial itself."""
HAS_ENDED = "had already ended the test"
"""End of a victim's failure if the other rank had left the test."""


# Controller -> rank


@dataclass(frozen=True)
class Preparation:
    """A run for an item, before the item's own and in another world."""

    kind: str
    """Noun for it in reports, "stage" say."""
    name: str

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`"


# What every test sends has no slots: pickling and reading a frozen class with slots takes half as long again.
@dataclass(frozen=True)
class RunItem:
    """Run one item's whole protocol."""

    nodeid: str
    path: str
    next_item: tuple[str, str] | None
    """Node id and path of the next item of this world: shared fixtures stay up. None: tear all down."""
    shared_tmp_path: str
    location: tuple[str, int | None, str] | None = None
    """Location in pytest's form: a rank need not look into the source for it."""
    preparation: Preparation | None = None
    """The run for the item that takes its place in this order."""
    functions: dict[str, frozenset[str]] = field(default_factory=dict)
    """The functions that this run has selected in the files of the item and of the next one, by node id."""
    parts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vote:
    """The outcome of one rank in one case (subtest) of a test.

    `outcome` is passed, failed, skipped, ended (the whole test), or met (the others, after a failed case).
    """

    case: str
    outcome: str
    reason: str = ""
    more: Any = None
    """Data for the other ranks; the controller only passes it on."""
    renews_deadline: bool = False
    """True if the deadline of the test starts again here: it is one for each example."""
    inside: bool = False
    """True if ranks meet inside of a case, in `world.rebuild` for example, which others may have left."""


REBUILT = "rebuilt"
"""The outcome of the last vote in `world.rebuild`: the rank has joined the new group."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The votes of all ranks, in rank order.

    The vote of a rank that has ended the test has the outcome "ended", or "died" where its death is excused.
    """

    votes: tuple[Vote, ...]
    parts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer with your `RankStatus`, or just with `Progress` if you get on."""

    full: bool = False
    """True if the answer must be a `RankStatus` in any case."""
    names_place: bool = False
    """True if `Progress` must include the line that the rank is at."""


@dataclass(frozen=True, slots=True)
class AbortGroup:
    """Abort the default group, so that a wait in a collective of this case fails."""

    case: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the session: tear down what is up, leave."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Interrupt what runs, as a Ctrl-C would; then tear down what is up, leave."""


@dataclass(frozen=True, slots=True)
class Part:
    """A message from one half of a feature to the other during an item, to a rank or from one."""

    feature: str
    data: Any


ToRank = RunItem | Agreed | Probe | AbortGroup | Close | Interrupt | Part


# Rank -> controller


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has joined its process group and its pytest session waits for items."""


@dataclass(frozen=True, slots=True)
class StartFailed:
    """The rank could not start; `text` says why."""

    text: str


@dataclass(frozen=True, slots=True)
class Collecting:
    """The rank imports a file of the item or of the next one; that time counts for no test."""

    path: str


@dataclass(frozen=True, slots=True)
class ItemStarted:
    """The rank has collected what it had to, and the item's own time begins."""


@dataclass(frozen=True)
class Reported:
    """One report of a phase or a subtest, serialised by `pytest_report_to_serializable`."""

    data: dict[str, Any]
    status: RankStatus | None = None
    """The status of the rank, where the report is of a failure."""


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning raised while the item ran."""

    module: str
    category: str
    text: str
    filename: str
    lineno: int


MEETING = "meeting"
"""Stands for the name of a group that `init_process_group` is to make, of all ranks."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective that a rank has begun in this test, or a call of `init_process_group`."""

    group: str
    """The name of its process group, the same on every rank."""
    ranks: tuple[int, ...]
    """The group's members; empty if the rank does not know them."""
    number: int
    """Number of the collective among those of the group, from 1; sends do not count."""
    op: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    in_flight: bool
    timeout: float = float("inf")
    """Seconds after which it fails with a timeout of its own."""


@dataclass(frozen=True, slots=True)
class BuildLock:
    """A file by which torch lets one process build a C++ extension (`torch.utils.cpp_extension`)."""

    path: str
    is_held: bool
    """True if this rank holds it, False if it may wait for it."""


State = Literal["runs", "reports", "votes", "idle", "stopped", "silent"]
"""State of a rank: it runs the test; it writes a report, of a failure perhaps; it has come to the end of a
subtest and waits for the others; it has ended the test. And what only the controller sees: its process is
stopped; it does not answer, as it holds the GIL."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The activity of a rank at one moment."""

    stacks: str
    """Python stacks of all threads."""
    where: str
    """`file:line in function` of the innermost frame that belongs to the user."""
    call: str = ""
    """The function of an installed package that was called there, "recv" say; or what it meets others in."""
    issued: tuple[Issued, ...] = ()
    """The latest collectives of this test, in the order in which they were begun."""
    before: dict[str, int] = field(default_factory=dict)
    """Number of collectives that each group had seen when the test began, where that is known."""
    state: State = "runs"
    case: str = ""
    """The subtest it is in, if it is in one of `run_subtests`."""
    count: str = ""
    """Count of its case, "subtest 17 of 144" or "example 23"."""
    build_locks: tuple[BuildLock, ...] = ()
    """torch's locks of C++ builds that it holds or waits for, where the whole status was asked for."""
    record: FlightRecord | None = None
    """The calls of this test, where the whole status was asked for."""
    blocked: float = 0.0
    """Seconds for which its main thread is known to have been blocked, without a break."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Data that features add to it, by the name of each."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The rank's main thread has moved since the last probe."""

    count: str = ""
    where: str = ""
    """User's line, as in `RankStatus`, where the probe asked for it; likewise the others."""
    call: str = ""
    computes: bool = False
    """True if it has run for most of the time since the last probe that asked; else it waits, or sleeps."""


@dataclass(frozen=True)
class Finished:
    """The item's protocol is over."""

    usable: bool
    """False when the default process group does not stand any more."""
    collectives: int
    """Number of collectives that the default group has seen; unequal numbers mean ranks out of step."""
    groups: int
    """Number of process groups that were ever made, which names the next one."""
    status: RankStatus | None = None
    """The collectives of the test, under `--check-collectives`."""
    parts: dict[str, Any] = field(default_factory=dict)


# A rank's messages cross the wire in tuples: all messages of a passing test go out in one write.
FromRank = (
    Ready
    | StartFailed
    | Collecting
    | ItemStarted
    | Reported
    | Part
    | Warned
    | Vote
    | RankStatus
    | Progress
    | Finished
)
