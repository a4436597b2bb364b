"""The place of a rank among hosts. Both sides import this; standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank, in a run on several hosts."""

    host: int
    """Number of its host among those of the world."""
    hosts: tuple[str, ...]
    """Names of the hosts of the world."""
    number: int
    """Number of its host among those of the run."""
    local_rank: int
    local_size: int
    address: str
    """Of its host."""
    master: str
    """Address of the host of rank 0."""
    store_port: int = 0
    """Where the ranks meet, on the host of rank 0; 0: in a file, as they are all on one host."""
    moved: tuple[tuple[str, str], ...] = ()
    """Directories of the controller's host, each with the one that stands for it on this one."""

    def path(self, path: str) -> str:
        """Return a path of the controller's host as it is on this one."""
        for before, here in self.moved:
            if path == before or path.startswith(f"{before}/"):
                return here + path[len(before) :]
        return path
