"""Connections between hosts: TCP, of two sides that prove to each other that they know the same secret.

A host that is gone is noticed by the kernel: it asks an idle peer every second, and gives up a connection on
which nothing was acknowledged for `GONE_AFTER`, except where `be_patient` was called. Nothing is encrypted.
Runs in controllers and agents; standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import Connection

from lockstep.exceptions import LaunchError

GONE_AFTER = 3.0
"""Seconds without any sign of a host after which it counts as gone."""
PROVE_WITHIN = 5
"""Seconds that the other side has to prove that it knows the secret."""
_NONCE = 32
_LONGEST = 256


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this host.

    Raises:
        OSError: the address is not of this host, or the port is taken.
    """
    return socket.create_server((address, port), backlog=128)


def prove(accepted: socket.socket, secret: bytes) -> Connection | None:
    """Return the connection of a socket that was accepted; None for a peer without the secret.

    That gets no answer, and nothing that it sends is unpickled. Each read may take `PROVE_WITHIN`.
    """
    connection = _as_connection(accepted)
    try:
        with _within(connection, PROVE_WITHIN):
            nonce = os.urandom(_NONCE)
            connection.send_bytes(nonce)
            answer = connection.recv_bytes(_LONGEST)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if hmac.compare_digest(proof, _proof(secret, b"client", nonce + theirs)):
                connection.send_bytes(_proof(secret, b"server", nonce + theirs))
                return connection
    except (EOFError, OSError):
        pass
    connection.close()
    return None


def connect(address: str, port: int, secret: bytes) -> Connection:
    """Return a connection to a host.

    Raises:
        OSError: it cannot be reached.
        LaunchError: it has another secret.
    """
    reached = socket.create_connection((address, port), timeout=GONE_AFTER)
    reached.settimeout(None)
    connection = _as_connection(reached)
    try:
        with _within(connection, PROVE_WITHIN):
            theirs, nonce = connection.recv_bytes(_LONGEST), os.urandom(_NONCE)
            connection.send_bytes(nonce + _proof(secret, b"client", theirs + nonce))
            if hmac.compare_digest(
                connection.recv_bytes(_LONGEST), _proof(secret, b"server", theirs + nonce)
            ):
                return connection
    except (EOFError, ConnectionError):
        pass
    except BaseException:
        connection.close()
        raise
    connection.close()
    raise LaunchError(f"{address}:{port} has another secret, or is no host of Lockstep")


def be_patient(connection: Connection) -> None:
    """Let the other side take its time to read: it may be stopped, or busy, while much is sent to it.

    That its host is gone is noticed on another connection.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    """Return what only a side with the secret can say; the name of the side keeps it from being sent back."""
    return hmac.new(secret, side + nonces, hashlib.sha256).digest()


def _as_connection(connected: socket.socket) -> Connection:
    for level, option, value in _options():
        with contextlib.suppress(OSError):
            connected.setsockopt(level, option, value)
    return Connection(connected.detach())


def _options() -> Iterator[tuple[int, int, int]]:
    yield socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
    yield socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
    # The last one, of Linux alone, holds for what was sent and not acknowledged as well.
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", int(GONE_AFTER)),
        ("TCP_USER_TIMEOUT", int(GONE_AFTER * 1000)),
    ):
        if hasattr(socket, name):
            yield socket.IPPROTO_TCP, getattr(socket, name), value


@contextlib.contextmanager
def _within(connection: Connection, seconds: int) -> Iterator[None]:
    """Make every read and write fail that takes longer."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
        yield
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
