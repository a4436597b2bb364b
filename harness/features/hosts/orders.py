"""The messages from a controller to the agent of another host. Both import this; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.launch.processes import RankProgram
from lockstep.place import Moved
from lockstep.specification import RankSpec

KEPT = "kept"
"""Suffix of the folder in which a rank keeps its output for `--rank-output-dir`."""


@dataclass(frozen=True, slots=True)
class Prestart:
    """Start the server that ranks are forked from, unless another controller has; without an answer."""

    start_method: str
    program: RankProgram


@dataclass(frozen=True, slots=True)
class PrepareWorld:
    """Make the directory of a world; answer with a `Prepared`."""

    world: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """The ports that a host keeps free for a world: MASTER_PORT, and that of the store where ranks meet."""

    port: int
    store_port: int


@dataclass(frozen=True, slots=True)
class StartRanks:
    """Start ranks whose connections are attached; answer with the pid of each."""

    world: str
    specs: tuple[RankSpec, ...]
    changed: dict[str, str]
    """Environment variables that have another value than when the run began."""
    removed: tuple[str, ...]
    patience: float
    """Seconds after which a server that is still importing is given up."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Answer with the `Fetched` files of a rank."""

    world: str
    rank: int
    known: dict[str, int]
    """Number of bytes that are known of each file that only grows, by name."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The files of a rank."""

    files: tuple[tuple[str, int, bytes], ...]
    """Path below the world's directory; where the content begins, in bytes; the content."""


@dataclass(frozen=True, slots=True)
class Look:
    """Answer with the kernel's letter for the state of a rank's process."""

    world: str
    rank: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Send the process of a rank a signal, or kill it with all that it has started if `number` is 0."""

    world: str
    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class EndWorld:
    """End what is left of a world, and remove its directory."""

    world: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Answer with the digest of each file, by paths of the controller's host."""

    paths: tuple[str, ...]
    moved: Moved


Order = Prestart | PrepareWorld | StartRanks | Fetch | Look | Signal | EndWorld | Digest
