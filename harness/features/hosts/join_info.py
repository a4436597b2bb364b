"""The join info: where node 0 waits, and the secret, as the launcher hands it to the other hosts.

By torchrun's store, by a file that all hosts see, or by hand. Standard library only: torch, which the store
takes, is imported in a process of its own (`python -m lockstep.features.hosts.join_info`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import select
import socket
import stat
import subprocess
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.exceptions import LaunchError
from lockstep.features.hosts.addresses import resolve, words
from lockstep.features.hosts.launchers import NodePlace

SECRET_VARIABLE = "LOCKSTEP_HOSTS_SECRET"
SHORTEST_SECRET = 16
LOOK_EVERY = 0.2
"""Seconds between looks at a file that is not there yet, or has join info that is no longer good."""
END_WITHIN = 10.0
"""Seconds that the process which reads torchrun's store has to end, or to answer after its deadline."""
IMPORT_WITHIN = 60.0
"""Seconds that it has to import torch, before any deadline counts."""
_KEY = "lockstep/hosts/join_info"
MAKE_SECRET = (
    "(umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > secret), copied to the others, "
    "and --secret-file secret on each"
)


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """All that a host needs to come to the rendezvous."""

    address: str
    port: int
    secret: bytes
    """Empty on its way where the user has given it to all hosts."""

    def pack(self) -> str:
        return json.dumps([self.address, self.port, self.secret.hex()])


def unpack(text: str) -> JoinInfo:
    """Read what `JoinInfo.pack` has written.

    Raises:
        LaunchError: something else has.
    """
    try:
        address, port, secret = json.loads(text)
        return JoinInfo(str(ipaddress.IPv4Address(address)), int(port), bytes.fromhex(secret))
    except (ValueError, TypeError) as error:
        raise LaunchError(
            f"what the launcher hands over is no invitation ({error}): give --meet and --secret-file"
        ) from None


def rendezvous_point(meet: str) -> tuple[str, int]:
    """Return the address and the port of `--meet`.

    Raises:
        LaunchError: it has no such form, or the host is not known.
    """
    host, _, port = meet.rpartition(":")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise LaunchError(
            f"--meet {meet}: give an address of node 0 and a free port there (1 to 65535): "
            "--meet 10.0.0.1:29400"
        )
    return resolve(host), int(port)


def take_secret(path: Path | None, environ: MutableMapping[str, str]) -> bytes | None:
    """Return the secret that the user gives, in a file or in the environment; None if there is none.

    It is taken out of the environment, which ranks get, and all that tests start.

    Raises:
        LaunchError: others can read it, it is too short, or no text.
    """
    text, where = environ.pop(SECRET_VARIABLE, None), SECRET_VARIABLE
    if path is not None:
        text, where = _read_private(path), str(path)
    if text is None:
        return None
    if len(text.strip()) < SHORTEST_SECRET:
        raise LaunchError(f"the secret in {where} has less than {SHORTEST_SECRET} characters: {MAKE_SECRET}")
    try:
        return text.strip().encode()
    except UnicodeEncodeError:
        raise LaunchError(f"the secret in {where} is no text (UTF-8): {MAKE_SECRET}") from None


def _read_private(path: Path) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # the open of a FIFO waits for a process that writes
            raise LaunchError(
                f"the secret {path} is no regular file: write it to one, or set {SECRET_VARIABLE}"
            )
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            text = file.read()
    except OSError as error:
        raise LaunchError(f"cannot read the secret {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"the secret in {path} is no text (UTF-8): {MAKE_SECRET}") from None
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
        module = "lockstep.features.hosts.join_info"
        command = [sys.executable, "-m", module, host, str(port), str(int(is_master))]
        self._where = f"{host}:{port}"
        self._has_imported = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is not for it: it ends with its input
        )

    def publish(self, join_info: JoinInfo, until: float) -> None:
        """Leave the join info for the others.

        Raises:
            LaunchError: the store could not be reached until that moment (monotonic).
        """
        self._ask("set", until, join_info.pack())

    def find(self, until: float) -> JoinInfo:
        """Return the join info, as soon as there is one.

        Raises:
            LaunchError: there was none until that moment (monotonic).
        """
        return unpack(self._ask("get", until))

    def _ask(self, verb: str, until: float, *words: str) -> str:
        seconds = max(until - time.monotonic(), 1.0)
        if not self._has_imported:
            self._has_imported = bool(self._read(IMPORT_WITHIN))
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([verb, seconds, *words]) + "\n")
            self._process.stdin.flush()
        return self._read(seconds + END_WITHIN)

    def _read(self, seconds: float) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
        if not (answer := self._process.stdout.readline()):
            error = (
                self._process.communicate()[1].strip().rpartition("\n")[2].rstrip(".") or "no answer in time"
            )
            raise LaunchError(
                f"the store of torchrun at {self._where} handed over no invitation: {error}. "
                "Was torchrun started on all hosts, and can they reach that?"
            )
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

    def publish(self, join_info: JoinInfo, until: float) -> None:
        """Leave the join info for the others, at once.

        Raises:
            LaunchError: the home directory takes no file.
        """
        partial = self._path.with_name(f"{self._path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(join_info.pack())
            partial.rename(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):  # there is none, or its folder is a file
                partial.unlink()
            why = f"cannot leave the invitation in {self._path}: {words(error)}"
            raise LaunchError(f"{why}; give --meet and --secret-file on each host") from None
        self._is_ours = True

    def find(self, until: float) -> JoinInfo:
        """Return the join info, as soon as there is one.

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
    """No way: the user has given it to all hosts."""

    def __init__(self, join_info: JoinInfo) -> None:
        self._join_info = join_info

    def publish(self, join_info: JoinInfo, until: float) -> None: ...

    def find(self, until: float) -> JoinInfo:
        return self._join_info

    def close(self) -> None: ...


class WithoutSecret:
    """Another way, which hands over a secret only where the user has not given one to all hosts."""

    def __init__(self, way: Store | SharedFile, secret: bytes | None) -> None:
        self._way = way
        self._secret = secret
        self.close = way.close

    def publish(self, join_info: JoinInfo, until: float) -> None:
        self._way.publish(join_info if self._secret is None else replace(join_info, secret=b""), until)

    def find(self, until: float) -> JoinInfo:
        """Return the join info; a secret that comes with it does not count where the user has given one.

        Raises:
            LaunchError: there was none until that moment (monotonic), or neither has a secret.
        """
        join_info = self._way.find(until)
        if not (secret := self._secret or join_info.secret):
            raise LaunchError(
                f"node 0 was given a secret, and this host was not: set {SECRET_VARIABLE}, or give "
                "--secret-file, on all hosts"
            )
        return replace(join_info, secret=secret)


def _serve_store(host: str, port: int, is_master: bool) -> None:
    """Answer questions on standard input with what torchrun's store says; in a process of its own."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    listening = socket.create_server((host, port)).detach() if is_master else None  # at that address alone
    _write("has imported torch")
    store = None
    for line in sys.stdin:
        verb, seconds, *texts = json.loads(line)
        patience = timedelta(seconds=seconds)
        store = store or TCPStore(
            host,
            port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=listening,
        )
        if verb == "set":
            store.set(_KEY, texts[0])
        else:
            store.wait([_KEY], patience)
            texts = [store.get(_KEY).decode()]
        _write(texts[0])


def _write(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve_store(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
