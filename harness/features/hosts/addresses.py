"""Addresses of this host: the one by which others reach it.

Runs in rendezvous and agents; standard library only.
"""

from __future__ import annotations

import ipaddress
import socket

from lockstep.exceptions import LaunchError


def resolve(host: str) -> str:
    """Return the IPv4 address of a host name: gloo is bound to the interface that has it.

    Raises:
        LaunchError: it has none, or it stands for all addresses of a host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"the host {host!r} is not known here: {words(error)}") from None
    except UnicodeError:
        raise LaunchError(f"{host!r} is no name that a host can have: give its address") from None
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
        raise LaunchError(
            f"{host} stands for all interfaces: give the address of the one that leads to the others"
        )
    if ":" in address:
        raise LaunchError(f"the host {host!r} has no IPv4 address here, and ranks of several hosts need one")
    return address


def is_here(address: str) -> bool:
    """Whether an address is one of this host."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
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
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing: the kernel only chooses an interface
        except OSError as error:
            raise LaunchError(f"no interface of this host leads to {address}: {words(error)}") from None
        return str(probe.getsockname()[0])


def words(error: OSError) -> str:
    if isinstance(error, TimeoutError | BlockingIOError):
        return "no answer in time"
    return error.strerror or str(error)
