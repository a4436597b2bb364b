"""The invitation: where node 0 waits, and the secret, as the launcher hands it to the other hosts.

By torchrun's store, by a file that all hosts see, or by hand. Standard library only: torch, which the store
takes, is imported in a process of its own (`python -m lockstep.hosts.invitation`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.exceptions import LaunchError
from lockstep.hosts.addresses import resolve, words
from lockstep.hosts.launchers import NodePlace

SECRET_VARIABLE = "LOCKSTEP_HOSTS_SECRET"
SHORTEST_SECRET = 16
LOOK_EVERY = 0.2
"""Seconds between looks at a file that is not there yet, or has an invitation that is no longer good."""
END_WITHIN = 10.0
"""Seconds that the process which reads torchrun's store has to end."""
_KEY = "lockstep/hosts/invitation"
_MAKE_ONE = (
    "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > secret), copied to the others, "
    "and --secret-file secret on each"
)


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a host needs to come to the meeting."""

    address: str
    port: int
    secret: bytes

    def pack(self) -> str:
        return json.dumps([self.address, self.port, self.secret.hex()])


def unpack(text: str) -> Invitation:
    """Read what `Invitation.pack` has written."""
    address, port, secret = json.loads(text)
    return Invitation(address, port, bytes.fromhex(secret))


@dataclass(frozen=True, slots=True)
class ByHand:
    """The words of the user about the meeting."""

    meet: str = ""
    """`ADDRESS:PORT` of node 0."""
    secret_file: Path | None = None


def meeting_point(meet: str) -> tuple[str, int]:
    """Return the address and the port of `--meet`.

    Raises:
        LaunchError: it has no such form, or the host is not known.
    """
    host, _, port = meet.rpartition(":")
    if not (host and port.isdigit()):
        raise LaunchError(
            f"--meet {meet}: give an address of node 0 and a free port there: --meet 10.0.0.1:29400"
        )
    return resolve(host), int(port)


def secret_of(by_hand: ByHand, environ: Mapping[str, str]) -> bytes | None:
    """Return the secret that the user gives, in a file or in the environment; None if there is none.

    Raises:
        LaunchError: others can read it, or it is too short.
    """
    if by_hand.secret_file is None:
        text, where = environ.get(SECRET_VARIABLE), SECRET_VARIABLE
    else:
        text, where = _read_private(by_hand.secret_file), str(by_hand.secret_file)
    if text is None:
        return None
    if len(text.strip()) < SHORTEST_SECRET:
        raise LaunchError(f"the secret in {where} has less than {SHORTEST_SECRET} characters: {_MAKE_ONE}")
    return text.strip().encode()


def secret_by_hand(by_hand: ByHand, environ: Mapping[str, str]) -> bytes:
    """Return the secret that the user gives.

    Raises:
        LaunchError: there is none; it says how to make one.
    """
    if (secret := secret_of(by_hand, environ)) is None:
        raise LaunchError(f"--meet needs a secret that all hosts have: on one host {_MAKE_ONE}")
    return secret


def new_secret() -> bytes:
    return secrets.token_hex(32).encode()


def _read_private(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise LaunchError(f"cannot read the secret {path}: {error.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid != os.geteuid():
        raise LaunchError(
            f"the secret {path} can be read by others than you (mode {stat.S_IMODE(status.st_mode):o}): "
            f"chmod 600 {path}"
        )
    return text


# Ways to hand it over: each has `publish`, `find` and `close`


class Store:
    """The store of torchrun, which a process with torch reads and writes.

    Where torchrun does not serve it, node 0's process does, until `close`.
    """

    def __init__(self, place: NodePlace) -> None:
        assert place.store is not None
        host, port = place.store
        is_master = not place.has_agent_store and place.node == 0
        command = [
            sys.executable,
            "-m",
            "lockstep.hosts.invitation",
            host,
            str(port),
            str(int(is_master)),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is not for it: it ends with its input
        )

    def publish(self, invitation: Invitation) -> None:
        self._ask("set", invitation.pack())

    def find(self, until: float) -> Invitation:
        """Return the invitation, as soon as there is one.

        Raises:
            LaunchError: there was none until that moment (monotonic).
        """
        return unpack(self._ask("get", str(max(until - time.monotonic(), 1.0))))

    def _ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            error = self._process.communicate()[1].strip().rpartition("\n")[2]
            raise LaunchError(f"the store of torchrun handed over no invitation: {error or 'it is gone'}")
        text: str = json.loads(answer)
        return text

    def close(self) -> None:
        try:
            self._process.communicate(timeout=END_WITHIN)
        except subprocess.TimeoutExpired:  # it still waits for the store
            self._process.kill()
            self._process.communicate()


class SharedFile:
    """A file in the home directory, which all hosts see: of launchers without a store."""

    def __init__(self, place: NodePlace) -> None:
        if not place.job:
            raise LaunchError(
                f"{place.launcher} gives its job no name by which hosts could find each other: give --meet "
                "ADDRESS:PORT and --secret-file FILE on each"
            )
        job = "".join(each if each.isalnum() or each in ".-" else "-" for each in place.job)
        directory = Path.home() / ".cache" / "lockstep"
        self._path = directory / f"hosts-{place.launcher}-{job}"
        self._launcher = place.launcher
        self._is_ours = False

    def publish(self, invitation: Invitation) -> None:
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(invitation.pack())
            partial.rename(self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            why = f"cannot leave the invitation in {self._path}: {words(error)}"
            raise LaunchError(f"{why}; give --meet and --secret-file on each host") from None
        self._is_ours = True

    def find(self, until: float) -> Invitation:
        """Return the invitation, as soon as there is one.

        Raises:
            LaunchError: there was none until that moment (monotonic).
        """
        while True:
            with contextlib.suppress(FileNotFoundError):
                return unpack(_read_private(self._path) if self._path.exists() else self._path.read_text())
            if time.monotonic() > until:
                raise LaunchError(
                    f"node 0 has not come: no invitation in {self._path}; hosts of {self._launcher} "
                    "that have no home directory in common need --meet and --secret-file"
                )
            time.sleep(LOOK_EVERY)

    def close(self) -> None:
        if self._is_ours:
            self._path.unlink(missing_ok=True)


class Known:
    """No way: the user has given it to both hosts."""

    def __init__(self, invitation: Invitation) -> None:
        self._invitation = invitation

    def publish(self, invitation: Invitation) -> None:
        """Do nothing: all know it."""

    def find(self, until: float) -> Invitation:
        return self._invitation

    def close(self) -> None:
        """Do nothing."""


def _serve_store(host: str, port: int, is_master: bool) -> None:
    """Answer questions on standard input with what torchrun's store says; in a process of its own."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    listening = socket.create_server((host, port)).detach() if is_master else None  # at that address alone
    store = TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=300),
        master_listen_fd=listening,
    )
    for line in sys.stdin:
        match json.loads(line):
            case ["set", text]:
                store.set(_KEY, text)
            case ["get", seconds]:
                store.wait([_KEY], timedelta(seconds=float(seconds)))
                text = store.get(_KEY).decode()
        sys.stdout.write(json.dumps(text) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve_store(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
