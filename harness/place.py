"""The place of a rank among hosts, interfaces and ports. Used on both sides; standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from dataclasses import dataclass

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>

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
    master: str
    """Address of the host of rank 0."""
    store_port: int = 0
    """Port at which ranks meet, on the host of rank 0; 0: in a file, as they are all on one host."""
    moved: Moved = ()

    def path(self, path: str) -> str:
        """Return a path of the controller's host as it is on this one."""
        return moved_path(path, self.moved)


def interface_of(address: str) -> str:
    """Return the name of the network interface that has an address; of 127.x.y.z, the loopback one."""
    names = [name for _, name in socket.if_nameindex()]
    if address.startswith("127."):
        return next((name for name in ("lo", "lo0") if name in names), names[0])
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in names:
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted:
                    return name
    return names[0]


def reserve_port(address: str) -> socket.socket:
    """Bind a free port, which the system then gives to no one; SO_REUSEADDR lets a rank listen there."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((address, 0))
    return bound
