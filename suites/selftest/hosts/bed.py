"""Two hosts on one machine: network namespaces with a cable between them, or two addresses of the loopback.

Namespaces take root, and a kernel that lets it make them. Each host has a directory of its own, with its own
copy of a project.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

from suites.selftest.project import copy_project, processes_with, wait_for
from suites.selftest.warm_interpreter import NAMESPACE
from suites.selftest.warm_pytest import WarmPopen, is_warm

NAMES = ("a", "b")
SECRET = "a secret of tests, and of nothing else"
_PREFIX = "lockstep-"
_numbers = count()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=180)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True)
class Ended:
    """The output of two processes of a run, by host, and their exit statuses."""

    outputs: tuple[str, ...]
    statuses: tuple[int, ...]

    @property
    def output(self) -> str:
        return self.outputs[0]

    def count(self) -> str:
        """Return the last line of pytest's output, without the time it took."""
        lines = [line for line in self.output.splitlines() if re.search(r" in [\d.]+s", line)]
        return re.sub(r" in [\d.]+s.*|=", "", lines[-1]).strip()


@dataclass
class Bed:
    """Two hosts, numbered as nodes.

    Attributes:
        addresses: of the two.
        namespaces: their names; empty where the hosts are two addresses of the loopback.
        warm: whether a process is a fork of a warm interpreter, but for one that would read something at its
            start. Its `/proc/PID/environ` is that of the interpreter.
    """

    path: Path
    addresses: tuple[str, str]
    namespaces: tuple[str, ...] = ()
    warm: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    port: int = field(default_factory=_free_port)
    """Of node 0, where by hand the hosts meet."""

    def __post_init__(self) -> None:
        for name in NAMES:
            (self.path / name / "tmp").mkdir(parents=True)
        (self.path / "home").mkdir()
        secret = self.path / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)

    def directory(self, host: int) -> Path:
        """Return the directory of a host in which its part of a run starts."""
        return self.path / NAMES[host]

    def copy(self, project: str, ini: str = "") -> None:
        """Give each host its own copy of a sample project."""
        for host in range(2):
            copy_project(project, self.directory(host))
            text = f"[pytest]\n{ini}\n"
            (self.directory(host) / "pytest.ini").write_text(text)

    def write(self, name: str, text: str) -> None:
        """Write a file on both hosts."""
        for host in range(2):
            (self.directory(host) / name).write_text(text)

    def start(self, host: int, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Start a command `[python, "-m", MODULE, ...]` on a host, in its directory, as a job of its own."""
        own = {
            "TMPDIR": str(self.directory(host) / "tmp"),
            "LOCKSTEP_TEST_MARK": self.mark,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HOME": str(self.path / "home"),  # which the hosts of a cluster share
        }
        variables = {**os.environ, **own, **environ}
        enter: tuple[str, ...] = ()
        start: type[subprocess.Popen[str]] = subprocess.Popen
        if self.warm and "PYTHONPATH" not in environ and is_warm(variables):
            start = WarmPopen
            variables |= {NAMESPACE: self.namespaces[host]} if self.namespaces else {}
        elif self.namespaces:
            enter = ("ip", "netns", "exec", self.namespaces[host])
        with open(self.path / f"{len(self.started)}.output", "w") as output:
            process = start(
                [*enter, *command],
                cwd=self.directory(host),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def output(self, process: subprocess.Popen[str]) -> str:
        """Return what a process has printed so far."""
        return (self.path / f"{self.started.index(process)}.output").read_text(errors="replace")

    def by_hand(
        self, host: int, *arguments: str, options: Sequence[str] = (), **environ: str
    ) -> subprocess.Popen[str]:
        """Start `harness hosts` on a host as in a terminal; with the arguments of pytest on node 0."""
        place = ("--node", f"{host}/2", "--meet", f"{self.addresses[0]}:{self.port}")
        secret = ("--secret-file", str(self.path / "secret"))
        return self.hosts(host, *arguments, options=(*place, *secret, *options), **environ)

    def hosts(
        self, host: int, *arguments: str, options: Sequence[str] = (), **environ: str
    ) -> subprocess.Popen[str]:
        """Start `harness hosts` on a host, with options, and with arguments for pytest."""
        return self.start(host, *command(host, self, *options), *behind_dashes(arguments), **environ)

    def run(self, *arguments: str, options: Sequence[str] = (), **environ: str) -> Ended:
        """Run pytest over both hosts to its end."""
        other = self.by_hand(1, options=options, **environ)
        return self.end(self.by_hand(0, *arguments, options=options, **environ), other)

    def end(self, *processes: subprocess.Popen[str], seconds: float = 240) -> Ended:
        """Wait for the end of processes."""
        until = time.monotonic() + seconds
        for process in processes:
            process.wait(max(until - time.monotonic(), 0.1))
        return Ended(tuple(map(self.output, processes)), tuple(process.returncode for process in processes))

    def set_cable(self, state: str) -> None:
        """Pull the cable out of host b ("down"), or put it in again ("up")."""
        _ip("-n", self.namespaces[1], "link", "set", "cable", state)

    def assert_nothing_is_left(self) -> None:
        """Wait for the end of all processes; no temporary file stays on either host."""
        wait_for(lambda: not processes_with(self.mark), "no process of either host is left", 60)
        left = [str(path) for host in range(2) for path in (self.directory(host) / "tmp").iterdir()]
        assert [
            path for path in left if not re.search("/(pytest-of|torchelastic_|torchinductor_)", path)
        ] == []

    def kill(self) -> None:
        """End what a failed test has left."""
        for pid in processes_with(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(60)


def command(host: int, bed: Bed, *options: str) -> tuple[str, ...]:
    """Return the command of a host, without arguments for pytest."""
    own = ("--name", NAMES[host], "--address", bed.addresses[host])
    return (sys.executable, "-m", "lockstep", "hosts", *own, *options)


def behind_dashes(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return arguments for pytest, with those that every session of a test takes."""
    own = ("-p", "lockstep.plugin", "-p", "no:cacheprovider", "-ra")
    return ("--", *own, *arguments) if arguments else ()


@contextlib.contextmanager
def two_hosts(path: Path, warm: bool = False) -> Iterator[Bed]:
    """Make two hosts, in namespaces where that can be; end all of theirs with the block."""
    with contextlib.ExitStack() as stack:
        if can_make_namespaces():
            namespaces = stack.enter_context(_two_namespaces())
            bed = Bed(path, ("10.77.0.1", "10.77.0.2"), namespaces, warm)
        else:
            bed = Bed(path, ("127.0.0.1", "127.0.0.2"), warm=warm)
        stack.callback(bed.kill)
        yield bed


@cache
def can_make_namespaces() -> bool:
    """Whether this process may make network namespaces and a cable between them."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    try:
        with _two_namespaces() as (first, _):
            _ip("netns", "exec", first, "true")
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@contextlib.contextmanager
def _two_namespaces() -> Iterator[tuple[str, str]]:
    """Make two namespaces, each with a loopback and one end of a cable; remove both at the end."""
    _remove_stale()
    number = next(_numbers)
    a, b = (f"{_PREFIX}{os.getpid()}-{number}-{name}" for name in NAMES)
    with contextlib.ExitStack() as stack:
        for name in (a, b):
            _ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)
        # Both ends are made where they belong: of equal names, outside, several beds would clash.
        _ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", address, "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield a, b


def _remove_stale() -> None:
    """Remove namespaces of test runs that were killed."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/run/netns"):
            match = re.fullmatch(rf"{_PREFIX}(\d+)-\d+-[ab]", name)
            if match and not Path(f"/proc/{match[1]}").exists():
                _ip("netns", "del", name)
