"""The specification of a rank: the kind of its world, the controller's session, and its own part.

Both sides import this; standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lockstep.place import Place

PLUGIN = "lockstep.plugin"
"""The module that is our plugin of pytest, and its name there unless `renames_plugin`."""

Spread = tuple[tuple[int, int], ...]
"""Numbers of hosts, each with that of its ranks there, in rank order; empty for the controller's alone."""


@dataclass(frozen=True, slots=True)
class WorldKey:
    """The properties that make two worlds interchangeable between tests."""

    size: int
    backend: str
    device: str
    has_group: bool = True
    """False if its ranks join no default process group: tests make their own."""
    spread: Spread = ()

    def __str__(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        ranks += f" on {len(self.spread)} hosts" if len(self.spread) > 1 else ""
        group = "" if self.has_group else ", without a group"
        return f"{ranks} ({self.backend}, {self.device}{group})"


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
    """False under `-s` and `--capture=tee-sys`: the ranks write where the controller writes."""
    output_directory: str = ""
    """Absolute path of the folder of `--rank-output-dir`, empty if there is none."""
    rootdir: str = ""
    inifile: str = ""
    """Path of the ini file, empty if there is none."""
    renames_plugin: bool = False
    """True where `-p harness.plugin`, or a conftest, gives our plugin that name in pytest."""
    to_rewrite: tuple[str, ...] = ()
    """Modules, and packages, of plugins and conftests whose asserts pytest is to rewrite."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Data that features send to their half in each rank, by the name of each."""


RankFile = Literal["log", "captured", "running", "stacks", "standing"]
"""Kind of a rank's file: its output outside of pytest's capture; the directory of the files that pytest
captures in; the running example of a property test, if it dies; stacks by faulthandler, if it holds the GIL;
how far it has come in its item."""


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
    held: str = ""
    """Path of a file that the process keeps locked until it ends, "" for none."""
    gpus: tuple[str, ...] = ()
    """Names of the accelerators of the world (`Device.names`); empty on CPUs."""
    port: int = 0
    """MASTER_PORT of the ranks."""
    place: Place | None = None
    """Place of the rank in a run on several hosts."""

    def workerinput(self) -> dict[str, Any]:
        """Return what the session of the rank has as `config.workerinput`.

        Outside of pytest-xdist each rank is a worker of its own, "gw0" to "gwN": plugins and conftests take
        the number for ports, databases and files of a process. Under `pytest -n` ranks are called as their
        worker.
        """
        given = self.session.workerinput
        own = {"workerid": f"gw{self.rank}", "workercount": self.key.size}
        return {**given, **(own if given["workerid"] == "master" else {})}

    def path_of(self, file: RankFile) -> str:
        """Return the path of a file of this rank."""
        return f"{self.directory}/rank-{self.rank}.{file}"
