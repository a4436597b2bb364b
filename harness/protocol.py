"""The messages between a controller and its ranks, and what a rank is told when it is born.

Both sides import this; standard library only. Pytest reports travel in pytest's own serialised form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANK_PLUGIN = "harness-rank"
"""The name under which a rank registers its session with pytest; no other pytest process has it."""

VICTIM_OF_A_POINT = "this point failed elsewhere: "
"""How a rank's subtest failure begins when the rank itself had no quarrel with the point."""


@dataclass(frozen=True, slots=True)
class WorldKey:
    """What makes two worlds interchangeable between tests."""

    size: int
    backend: str
    device: str

    def __str__(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        return f"{ranks} ({self.backend}, {self.device})"


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The controller's pytest session, as far as a rank has to repeat it."""

    args: tuple[str, ...]
    cwd: str
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    environ: dict[str, str]
    workerinput: dict[str, Any]
    captures: bool
    """False under ``-s``: the ranks write where the controller writes."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything a new process needs to become one rank of a world."""

    rank: int
    key: WorldKey
    session: SessionSpec
    seed: int
    directory: str
    """Private directory (mode 0700) of the world: stores, logs, stacks."""
    basetemp: str

    def path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    @property
    def log_path(self) -> str:
        """What the rank writes to its standard streams outside of pytest's capture."""
        return self.path(f"rank-{self.rank}.log")

    @property
    def phases_path(self) -> str:
        """Where the rank notes how many phases of the item are over, for the case that it dies."""
        return self.path(f"rank-{self.rank}.phases")

    @property
    def stacks_path(self) -> str:
        """Where faulthandler writes when a rank cannot answer, because it holds the GIL."""
        return self.path(f"rank-{self.rank}.stacks")


# Controller -> rank


@dataclass(frozen=True, slots=True)
class RunItem:
    """Run one item's whole protocol."""

    nodeid: str
    path: str
    next_item: tuple[str, str] | None
    """Node id and path of the next item of this world: fixtures it shares stay up. None tears all down."""
    shared_tmp_path: str


@dataclass(frozen=True, slots=True)
class Vote:
    """How one rank fared at one point (subtest) of a test. `outcome` is passed, failed, skipped or ended."""

    point: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Agreed:
    """The votes of all ranks on the same point, in rank order."""

    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True)
class ShowStacks:
    """Say what you are doing."""


@dataclass(frozen=True, slots=True)
class Close:
    """End the session: tear down what is up, leave."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Break off what runs, as a Ctrl-C would; then tear down what is up, leave."""


ToRank = RunItem | Agreed | ShowStacks | Close | Interrupt


# Rank -> controller


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank has joined its process group and its pytest session waits for items."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The rank could not come up; `text` says why."""

    text: str


@dataclass(frozen=True, slots=True)
class Collecting:
    """The rank imports a file of the item or of the next one: time that is no test's."""


@dataclass(frozen=True, slots=True)
class Began:
    """The rank has collected what it had to, and the item's own time begins."""


@dataclass(frozen=True, slots=True)
class Reported:
    """One report of a phase or a subtest, serialised by `pytest_report_to_serializable`."""

    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Warned:
    """One warning raised while the item ran."""

    module: str
    category: str
    text: str
    filename: str
    lineno: int


@dataclass(frozen=True, slots=True)
class Voted:
    vote: Vote


@dataclass(frozen=True, slots=True)
class Doing:
    """What a rank does at the moment."""

    stacks: str
    """Python stacks of all threads."""
    where: str
    """`file:line in function` of the innermost frame that belongs to the user."""
    collective: str | None = None
    """The collective in flight: operation, sequence number, dtype, shape."""
    on_world: bool = False
    """Whether that collective is one of the default group, which needs every rank."""
    sequence: int = 0
    """The collective's number in its group, from 1."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The item's protocol is over."""

    usable: bool
    """False when the default process group does not stand any more."""
    collectives: int
    """How many collectives the default group has seen; unequal numbers mean ranks out of step."""
    groups: int
    """How many process groups were ever made, which names the next one."""


# A rank's messages cross the wire in tuples: what it has to say of a passing test goes out in one.
FromRank = Ready | Broken | Collecting | Began | Reported | Warned | Voted | Doing | Finished
