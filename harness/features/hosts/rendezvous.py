"""The rendezvous of hosts: node 0 takes the others in, as long as it runs pytest; they wait for its end.

What crosses these connections is JSON, and short: which host, where its agent listens; at the end a status.
Runs on every host, on node 0 in threads of pytest's process; must not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.addresses import words
from lockstep.features.hosts.hosts_file import HostInfo, HostsFile, write_hosts_file
from lockstep.features.hosts.join_info import JoinInfo, Known, WithoutSecret
from lockstep.features.hosts.launchers import NodePlace
from lockstep.features.hosts.listener import Listener
from lockstep.features.hosts.wire import (
    GONE_AFTER,
    RUN,
    Call,
    Credentials,
    Purpose,
    SignedConnection,
    connect,
    listen,
)

SAY_AFTER = 5.0
"""Seconds of waiting after which a host says whom it waits for."""
TRY_EVERY = 0.3
"""Seconds between attempts to come to a rendezvous that is not open yet."""
NAMED = 16
"""Hosts that are missing which a message names."""
HELLO_WITHIN = 5.0
"""Seconds that a host with the secret gets to say who it is."""


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all hosts; of Lockstep the contents of its files, too."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "torch": _version("torch"),
        "Lockstep": f"{_version('lockstep-harness')} (files {digest.hexdigest()[:12]})",
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


# Node 0


class Rendezvous:
    """Takes in the other hosts, and writes the file of hosts when all are there, and when one has come back.

    Args:
        place: of node 0.
        this: this host, with the address to wait at.
        join_info: where to wait, port 0 for a free one, and the secret.
        path: of the file of hosts.
        environ: of the file of hosts.

    Raises:
        LaunchError: this host cannot listen there.
    """

    def __init__(
        self, place: NodePlace, this: HostInfo, join_info: JoinInfo, path: Path, environ: dict[str, str]
    ) -> None:
        self._place = place
        self._credentials = Credentials(join_info.secret, os.urandom(RUN))
        self._path = path
        self._environ = environ
        self._hosts: dict[int, HostInfo] = {0: this}
        self._connections: dict[int, SignedConnection] = {}
        self._changed = threading.Condition()
        self._refused = ""
        try:
            listening = listen(join_info.address, join_info.port)
        except OSError as error:
            where = f"{join_info.address}:{join_info.port}"
            raise LaunchError(f"node 0 cannot wait for the others at {where}: {words(error)}") from None
        self._listener = Listener(listening, 0, self._credentials, ("rendezvous",), self._admit)
        self.join_info = replace(join_info, port=self._listener.port)
        reading, self._stop = os.pipe()
        self._serving = threading.Thread(
            target=self._serve, args=(reading,), name="hosts-rendezvous", daemon=True
        )
        self._serving.start()

    def await_all(self, seconds: float, say: Callable[[str], object]) -> tuple[HostInfo, ...]:
        """Wait until all hosts have come; write the file of hosts, and return it.

        Raises:
            LaunchError: one has not come in time, or must not come.
        """
        until = time.monotonic() + seconds
        with self._changed:
            if not self._changed.wait_for(self._is_decided, min(SAY_AFTER, seconds)):
                if seconds > SAY_AFTER:
                    say(f"waiting for {self._missing()}, up to {seconds:g} s; {self._where()}")
                self._changed.wait_for(self._is_decided, until - time.monotonic())
            if self._refused:
                raise LaunchError(self._refused)
            if missing := self._missing():
                has_come = f"{missing} has not come within {seconds:g} s"
                raise LaunchError(
                    f"{has_come}; {self._where()}. Was it started there, and can it reach this?"
                )
            return self._write()

    def end(self, status: int) -> None:
        """Tell all hosts with which status pytest has ended; take in none any more."""
        os.close(self._stop)
        self._serving.join()
        with self._changed:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.send_bytes(json.dumps({"end": status}).encode())
                connection.close()
            self._connections.clear()

    def _is_decided(self) -> bool:
        return bool(self._refused) or self._is_complete()

    def _is_complete(self) -> bool:
        return len(self._hosts) == self._place.nodes

    def _missing(self) -> str:
        absent = [str(node) for node in range(self._place.nodes) if node not in self._hosts]
        if len(absent) > NAMED:
            absent[NAMED:] = [f"and {len(absent) - NAMED} more"]
        return f"node {', '.join(absent)} of {self._place.nodes}" if absent else ""

    def _where(self) -> str:
        return f"node 0, {self._hosts[0].name}, waits at {self.join_info.address}:{self.join_info.port}"

    def _write(self) -> tuple[HostInfo, ...]:
        hosts = tuple(self._hosts[node] for node in range(self._place.nodes))
        write_hosts_file(self._path, HostsFile(self._credentials, hosts, self._environ, _command()))
        return hosts

    def _serve(self, stop: int) -> None:
        self._listener.serve(stop)
        self._listener.close()
        os.close(stop)

    def _admit(self, connection: SignedConnection, call: Call) -> None:
        # In a thread of its own: it may take its time to describe itself.
        greeting = threading.Thread(target=self._greet, args=(connection, call.caller), daemon=True)
        greeting.start()

    def _greet(self, connection: SignedConnection, node: int) -> None:
        with contextlib.suppress(
            OSError, EOFError, ValueError, KeyError, TypeError
        ):  # it has gone, or is no host
            if connection.poll(HELLO_WITHIN):
                hello = json.loads(connection.recv_bytes())
                with self._changed:
                    answer = self._answer(node, hello, connection)
                    connection.send_bytes(json.dumps(answer).encode())
                    self._changed.notify_all()
                if "name" in answer:
                    return
        connection.close()

    def _answer(self, node: int, hello: dict[str, Any], connection: SignedConnection) -> dict[str, Any]:
        nodes = int(hello["nodes"])
        host = HostInfo(**hello["host"] | {"gpus": tuple(hello["host"]["gpus"])})
        who = f"{host.name} ({host.address})"
        if nodes != self._place.nodes or not 0 < node < nodes:
            return self._refuse(
                f"{who} came as node {node} of {nodes}, and node 0 waits for {self._place.nodes} hosts"
            )
        if different := _difference(self._hosts[0], host):
            return self._refuse(different)
        there = self._connections.get(node)
        if there is not None and not _has_ended(there):
            other = self._hosts[node]
            text = f"node {node} is {other.name} ({other.address}) already: {who} needs another number"
            return {"refused": text, "is_taken": True}
        names = {each.name for number, each in self._hosts.items() if number != node}
        if host.name in names:  # containers, or two processes of one machine
            host = replace(host, name=f"{host.name}-{node}")
        was_complete = self._is_complete()
        if there is not None:
            there.close()
        self._hosts[node], self._connections[node] = host, connection
        if was_complete:
            self._write()
        return {"name": host.name, "first": self._hosts[0].name}

    def _refuse(self, why: str) -> dict[str, Any]:
        """Return the refusal of a host; before pytest has begun, the rendezvous fails for it."""
        if not self._is_decided():
            self._refused = why
        return {"refused": why}


def _command() -> tuple[str, ...]:
    """Return the command that was typed here, up to the arguments of pytest."""
    typed = sys.orig_argv[1:]
    return ("python", *typed[: typed.index("--") if "--" in typed else len(typed)], "--")


def _difference(first: HostInfo, other: HostInfo) -> str:
    """Return how the versions of two hosts differ, in a sentence; "" if they do not."""
    for name, ours in first.versions.items():
        theirs = other.versions.get(name, "none")
        if theirs != ours:
            text = f"{other.name} has {name} {theirs}, and node 0, {first.name}, has {ours}"
            return f"{text}: install the same on both"
    return ""


def _has_ended(connection: SignedConnection) -> bool:
    """Whether the other end is gone: it never sends a second message."""
    return bool(select.select([connection], [], [], 0)[0])


# Every other node


@dataclass(frozen=True, slots=True)
class Membership:
    """A host's place in the rendezvous."""

    name: str
    """Name of this host in reports."""
    first: str
    """Name of node 0."""
    connection: SignedConnection

    def read_end(self) -> int | None:
        """Return the status with which pytest has ended on node 0, once there is something to read.

        None: node 0 is gone.
        """
        try:
            return int(json.loads(self.connection.recv_bytes())["end"])
        except (OSError, EOFError):
            return None


@dataclass(frozen=True, slots=True)
class Comer:
    """A host on its way to the rendezvous.

    Args:
        describe: returns the host, with an agent at the interface that leads to the address of node 0.
    """

    place: NodePlace
    way: Known | WithoutSecret
    describe: Callable[[str, Credentials], HostInfo]
    say: Callable[[str], object]
    is_by_hand: bool

    def come(self, seconds: float) -> Membership:
        """Join the rendezvous, which may open later.

        Raises:
            LaunchError: it did not open in time, or has no place for this host.
        """
        start = time.monotonic()
        has_said = False
        while True:
            last_try, is_taken = time.monotonic() > start + seconds, False
            join_info = self.way.find(start + seconds)
            where = f"{join_info.address}:{join_info.port}"
            try:
                return self._introduce(join_info)
            except OSError as error:
                why = f"node 0 cannot be reached at {where}: {words(error)}"
            except EOFError:
                why = f"node 0 at {where} has closed the connection"
            except _Taken as error:  # a host that lost its power is missed after some seconds only
                is_taken = True
                why, last_try = str(error), time.monotonic() > start + 2 * GONE_AFTER
            except LaunchError as error:
                # That of an earlier run may still be in its place.
                why, last_try = str(error), last_try or self.is_by_hand or isinstance(error, _Refused)
            if last_try:
                raise LaunchError(why)
            if not (has_said or is_taken) and time.monotonic() > start + SAY_AFTER:
                has_said = True
                self.say(f"{why}; trying for {seconds:g} s")
            time.sleep(TRY_EVERY)

    def _introduce(self, join_info: JoinInfo) -> Membership:
        call = Call(Purpose("rendezvous"), self.place.node, 0, join_info.address, join_info.port)
        connection = connect(call, Credentials(join_info.secret))
        host = self.describe(join_info.address, Credentials(join_info.secret, connection.run))
        hello = {"nodes": self.place.nodes, "host": asdict(host)}
        connection.send_bytes(json.dumps(hello).encode())
        if not connection.poll(HELLO_WITHIN):
            raise TimeoutError("no answer in time")
        answer = json.loads(connection.recv_bytes())
        if "refused" in answer:
            connection.close()
            raise (_Taken if answer.get("is_taken") else _Refused)(answer["refused"])
        return Membership(answer["name"], answer["first"], connection)


class _Refused(LaunchError):
    """Node 0 has no place for this host."""


class _Taken(LaunchError):
    """Another host has this one's number; or this one had it, and is back before it was missed."""
