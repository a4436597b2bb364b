"""Addresses of this host: the one by which others reach it, and the interface that has it.

Runs in meetings and agents; standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

from harness.exceptions import LaunchError

_SIOCGIFADDR = 0x8915
"""Asks Linux for the IPv4 address of an interface (netdevice(7))."""


def resolve(host: str) -> str:
    """Return the address of a host name, an IPv4 one where it has one.

    Raises:
        LaunchError: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"the host {host!r} is not known here: {words(error)}") from None
    return str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_here(address: str) -> bool:
    """Whether an address is one of this host."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(address: str) -> str:
    """Return this host's address on the interface that leads to another one; itself if it is of this host.

    Raises:
        LaunchError: none leads there.
    """
    if is_here(address):
        return address
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: the kernel only chooses an interface
        except OSError as error:
            raise LaunchError(f"no interface of this host leads to {address}: {words(error)}") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has an IPv4 address; None if that cannot be found out."""
    if address.startswith("127."):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def words(error: OSError) -> str:
    """Return what an error says, in words."""
    if isinstance(error, TimeoutError | BlockingIOError):
        return "no answer in time"
    return error.strerror or str(error)
