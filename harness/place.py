"""The place of a rank among hosts. Both sides import this; standard library only."""

from __future__ import annotations

from dataclasses import dataclass

Moved = tuple[tuple[str, str], ...]
"""Directories of the controller's host, each with the one that stands for it on another."""


def moved_path(path: str, moved: Moved) -> str:
    """Return a path of the controller's host as it is on another."""
    for before, there in moved:
        if path == before or path.startswith(f"{before}/"):
            return there + path[len(before) :]
    return path


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
    moved: Moved = ()

    def path(self, path: str) -> str:
        """Return a path of the controller's host as it is on this one."""
        return moved_path(path, self.moved)
