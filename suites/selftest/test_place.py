"""Unit tests of places of ranks: paths on other hosts, interfaces of addresses, and reserved ports."""

from __future__ import annotations

import errno
import fcntl
import socket

import pytest

from lockstep import place
from lockstep.place import Place, interface_of, moved_path, reserve_port

MOVED = (("/tmp/a", "/scratch/b"), ("/tmp", "/t"))


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/tmp/a", "/scratch/b"),
        ("/tmp/a/x/y", "/scratch/b/x/y"),
        ("/tmp/ab", "/t/ab"),
        ("/tmp/tmp/x", "/t/tmp/x"),
        ("/tmpfs", "/tmpfs"),
        ("/home/tmp/a", "/home/tmp/a"),
    ],
)
def test_paths_below_moved_directories_lead_to_those_that_stand_for_them(path: str, there: str) -> None:
    assert moved_path(path, MOVED) == there
    assert moved_path(path, ()) == path
    of_rank = Place(1, ("a", "b"), 1, 0, 2, "10.0.0.2", "10.0.0.1", moved=MOVED)
    assert of_rank.path(path) == there
    assert of_rank.store_port == 0


@pytest.mark.parametrize(
    ("names", "address", "name"),
    [
        (["eth0", "lo"], "127.0.0.1", "lo"),
        (["eth0", "lo0"], "127.3.2.1", "lo0"),
        (["eth0", "eth1"], "127.0.0.1", "eth0"),
        (["lo", "eth0", "eth1"], "10.0.0.2", "eth1"),
        (["lo", "eth0", "none"], "10.0.0.9", "lo"),
    ],
)
def test_an_interface_is_found_by_its_address(
    monkeypatch: pytest.MonkeyPatch, names: list[str], address: str, name: str
) -> None:
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.0.2"}

    def ioctl(asking: socket.socket, request: int, given: bytes) -> bytes:
        asked = given.rstrip(b"\0").decode()
        if asked not in addresses:
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        assert (request, len(given)) == (0x8915, 256)
        return given[:20] + socket.inet_aton(addresses[asked]) + given[24:]

    monkeypatch.setattr(place.socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert interface_of(address) == name


def test_a_reserved_port_is_given_to_no_other_and_a_rank_may_listen_there() -> None:
    with reserve_port("127.0.0.1") as reserved:
        host, port = reserved.getsockname()
        assert host == "127.0.0.1"
        assert port > 0
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            listening.listen()
