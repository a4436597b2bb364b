"""Connections between hosts: TCP, with a proof at both ends, and a tag on each message.

Both ends prove that they have the secret of the run, for a `Call`: the purpose of the connection, the nodes,
and where the listener is. So a proof is worth nothing where it is relayed to. The keys of the connection
follow from the secret, the call and both nonces, and each message carries a tag by the key of its direction,
over its number and its bytes: someone in between can only break a connection. Nothing is encrypted.

A host that is gone is noticed by the kernel: it asks an idle peer every second, and gives up a connection on
which nothing was acknowledged for `GONE_AFTER`, except where `be_patient` was called.
Runs in controllers, agents and ranks; standard library only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from lockstep.exceptions import LaunchError, MessageRefused
from lockstep.launch.multiprocessing_internals import pickle_message, sent_descriptor

GONE_AFTER = 3.0
"""Seconds without any sign of a host after which it counts as gone."""
PROVE_WITHIN = 5.0
"""Seconds that the other side has for the whole proof."""
RUN = 16
"""Bytes of the name of a run, which is no secret."""
_NONCE = 32
_TAG = 32
_HEAD = _TAG + _NONCE + 2
_LONGEST = 1024
"""Bytes of a packed call."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret of a run and its public name, which keeps apart runs that have one secret."""

    secret: bytes
    run: bytes = b""
    """Empty where only node 0 knows it: it comes with the challenge, and is a part of the proof."""


@dataclass(frozen=True, slots=True)
class Purpose:
    """The use of a connection.

    "rendezvous" brings a host to node 0. From a controller to an agent, "control" carries orders and an
    answer to each; "wire" becomes the wire of a rank; "end" gets the exit code of its process.
    """

    kind: Literal["rendezvous", "control", "wire", "end"]
    world: str = ""
    """Name of the world, that no other controller uses."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """All that both ends of a connection must agree on."""

    purpose: Purpose
    caller: int
    """Number of the node that connects."""
    callee: int
    """Number of the node that listens."""
    address: str
    """Announced address of the listener: in the join info, by `--meet`, or in the file of hosts."""
    port: int

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def unpack_call(packed: bytes) -> Call:
    """Read what `Call.pack` has written."""
    content = json.loads(packed)
    return Call(**content | {"purpose": Purpose(**content["purpose"])})


class SignedConnection(Connection):
    """A connection on which each message carries a tag, which is verified before anything is unpickled.

    Attributes:
        run: Name of the run that both ends have proved.
    """

    def __init__(self, handle: int, run: bytes, keys: _Keys) -> None:
        super().__init__(handle)
        self.run = run
        self._keys = keys
        self._sent = self._received = 0

    def send(self, obj: Any) -> None:
        self.send_bytes(pickle_message(obj))

    def send_bytes(self, buf: Any, offset: int = 0, size: int | None = None) -> None:
        content = memoryview(buf)[offset:][:size]
        super().send_bytes(b"".join((_tag(self._keys.sending, self._sent, content), content)))
        self._sent += 1  # a Ctrl-C while the other side did not read has sent nothing

    def recv(self) -> Any:
        return pickle.loads(self.recv_bytes())

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """Return the next message.

        Raises:
            MessageRefused: it was changed, left out, sent before, or sent by someone else.
        """
        frame = super().recv_bytes(None if maxlength is None else maxlength + _TAG)
        content = frame[_TAG:]
        if not hmac.compare_digest(frame[:_TAG], _tag(self._keys.receiving, self._received, content)):
            self._shut_down()
            raise MessageRefused(
                "a message between hosts was changed, or came twice or out of order: something on the way "
                "changes packets; use a private network, or a tunnel"
            )
        self._received += 1
        return content

    def recv_bytes_into(self, buf: Any, offset: int = 0) -> int:
        content = self.recv_bytes()
        memoryview(buf)[offset : offset + len(content)] = content
        return len(content)

    def _shut_down(self) -> None:
        """End the connection for both sides: nothing that follows can be trusted."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def __reduce__(self) -> tuple[Callable[..., SignedConnection], tuple[Any, ...]]:
        """Hand the connection on to a new process, which goes on to count where this one has stopped."""
        return _handed_on, (sent_descriptor(self.fileno()), self.run, self._keys, self._sent, self._received)


def _handed_on(descriptor: Any, run: bytes, keys: _Keys, sent: int, received: int) -> SignedConnection:
    connection = SignedConnection(descriptor.detach(), run, keys)
    connection._sent, connection._received = sent, received
    return connection


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one end, of the two directions."""

    sending: bytes
    receiving: bytes


def _tag(key: bytes, number: int, content: bytes | memoryview) -> bytes:
    return hmac.digest(key, b"".join((number.to_bytes(8), content)), "sha256")


# The proof: a challenge (run, nonce), an answer (proof, nonce, length, call), a proof


class _Handshake:
    """The proofs and keys that follow from a secret and all that was said in the open."""

    def __init__(self, secret: bytes, challenge: bytes, nonce: bytes, call: bytes) -> None:
        self._secret = secret
        self._said = b"".join((challenge, nonce, call))  # of fixed length, but for the last one
        self._run = challenge[:RUN]

    def of_client(self) -> bytes:
        return self._derive(b"lockstep hosts: proof of the client")

    def of_server(self) -> bytes:
        return self._derive(b"lockstep hosts: proof of the server")

    def connection(self, connected: socket.socket, *, is_client: bool) -> SignedConnection:
        """Return the connection over a socket on which both sides have proved."""
        there = self._derive(b"lockstep hosts: key from client to server")
        back = self._derive(b"lockstep hosts: key from server to client")
        for level, option, value in _options():
            with contextlib.suppress(OSError):
                connected.setsockopt(level, option, value)
        connected.settimeout(None)
        keys = _Keys(there, back) if is_client else _Keys(back, there)
        return SignedConnection(connected.detach(), self._run, keys)

    def _derive(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, b"".join((label, b"\0", self._said)), "sha256")


def connect(call: Call, credentials: Credentials) -> SignedConnection:
    """Return a connection to a host.

    Raises:
        OSError: it cannot be reached, or does not answer.
        LaunchError: it has another secret, or is not who is called.
    """
    reached = socket.create_connection((call.address, call.port), timeout=GONE_AFTER)
    try:
        with contextlib.suppress(EOFError, ConnectionError):
            return _prove(reached, call, credentials)
        reached.close()
    except BaseException:
        reached.close()
        raise
    where = f"{call.address}:{call.port}"
    raise LaunchError(f"{where} has another secret, or is no host of Lockstep that listens at that address")


def _prove(reached: socket.socket, call: Call, credentials: Credentials) -> SignedConnection:
    until = time.monotonic() + PROVE_WITHIN
    challenge, nonce, packed = _read(reached, RUN + _NONCE, until), os.urandom(_NONCE), call.pack()
    if credentials.run and not challenge.startswith(credentials.run):
        raise ConnectionError("it is of another run")
    handshake = _Handshake(credentials.secret, challenge, nonce, packed)
    reached.sendall(b"".join((handshake.of_client(), nonce, len(packed).to_bytes(2), packed)))
    if not hmac.compare_digest(_read(reached, _TAG, until), handshake.of_server()):
        raise ConnectionError("it has another secret")
    return handshake.connection(reached, is_client=True)


def _read(reached: socket.socket, size: int, until: float) -> bytes:
    received = b""
    while len(received) < size:
        reached.settimeout(max(until - time.monotonic(), 0.001))
        if not (more := reached.recv(size - len(received))):
            raise EOFError
        received += more
    return received


class Challenge:
    """A listener's part of the proof, on a socket that it has accepted; never waits.

    Raises:
        OSError: the other side is gone already.
    """

    def __init__(self, accepted: socket.socket, credentials: Credentials) -> None:
        self.until = time.monotonic() + PROVE_WITHIN
        self._accepted = accepted
        self._secret = credentials.secret
        self._challenge = credentials.run + os.urandom(_NONCE)
        self._received = b""
        self._handshake = _Handshake(b"", b"", b"", b"")
        accepted.setblocking(False)
        accepted.send(self._challenge)

    def fileno(self) -> int:
        return self._accepted.fileno()

    def close(self) -> None:
        self._accepted.close()

    def read(self) -> Call | None:
        """Return what the connection is for, once that is proved; None where more is to come.

        Raises:
            OSError: the other side has no proof, or is gone.
            ValueError: the call is none.
        """
        more = self._accepted.recv(_HEAD + _LONGEST)
        self._received += more
        size = int.from_bytes(self._received[_HEAD - 2 : _HEAD])
        if more and size <= _LONGEST and len(self._received) < _HEAD + size:
            return None
        proof, nonce, call = self._received[:_TAG], self._received[_TAG : _HEAD - 2], self._received[_HEAD:]
        self._handshake = _Handshake(self._secret, self._challenge, nonce, call)
        if not hmac.compare_digest(proof, self._handshake.of_client()):
            raise ConnectionError("no proof")
        return unpack_call(call)

    def answer(self) -> SignedConnection:
        """Return the connection, after this side's proof; `read` has returned a call."""
        self._accepted.send(self._handshake.of_server())
        return self._handshake.connection(self._accepted, is_client=False)


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at one address of this host.

    Raises:
        OSError: the address is not of this host, or the port is taken.
    """
    return socket.create_server((address, port), backlog=128)


def be_patient(connection: Connection) -> None:
    """Let the other side take its time to read: it may be stopped, or busy, while much is sent to it.

    That its host is gone is noticed on another connection.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


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
