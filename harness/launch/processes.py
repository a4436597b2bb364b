"""The launcher `processes`: ranks forked from a preloaded server, or spawned, by `multiprocessing`.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from lockstep.exceptions import LaunchError
from lockstep.launch import server
from lockstep.launch.bootstrap import start_rank
from lockstep.launch.limits import check_open_files, explain
from lockstep.launch.multiprocessing_internals import (
    UNKNOWN_EXIT_CODE,
    private_directory,
    server_pid,
    start_server,
    stop_server,
    without_main_module,
)
from lockstep.place import Moved
from lockstep.process_tree import children_of, end, kill_group, start_of, stat_of, with_descendants
from lockstep.specification import RankSpec, WorldKey

DYING = 2.0
"""Seconds in which a server that has closed its socket ends."""


class ChildProcess:
    """A process that the server forked: the part of `multiprocessing.Process` that a world uses.

    `multiprocessing` learns of its end from the server, and takes the end of the server for that of every
    process it has forked. The kernel knows better where it has descriptors of processes (Linux since 5.3).
    """

    def __init__(self, process: BaseProcess, has_server: Callable[[], bool]) -> None:
        self._process = process
        self._has_server = has_server
        self._descriptor: int | None = None
        self.pid = process.pid
        self.sentinel = process.sentinel
        if hasattr(os, "pidfd_open") and process.pid is not None:
            try:
                self._descriptor = self.sentinel = os.pidfd_open(process.pid)
            except OSError:  # it has ended already: then the server knows its exit code
                return
            weakref.finalize(self, os.close, self._descriptor)

    def is_alive(self) -> bool:
        return not wait([self.sentinel], 0)

    def join(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for its end, and for the server to report its exit code."""
        if wait([self.sentinel], timeout):
            self._process.join(1.0)

    @property
    def exitcode(self) -> int | None:
        """Its exit code; None while it lives, and where only a server that is gone could report it."""
        if self.is_alive():
            return None
        code = self._process.exitcode
        return None if code == UNKNOWN_EXIT_CODE and not self._has_server() else code

    def kill(self) -> None:
        if self._descriptor is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and has been waited for
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class StartedRank(Protocol):
    """A started rank as a world uses it, wherever its process runs."""

    @property
    def wire(self) -> Connection:
        """The controller's end of the wire."""

    @property
    def pid(self) -> int: ...

    @property
    def began(self) -> str:
        """`start_of` the process, "" on another host: once it has ended, another may have its number."""

    @property
    def host(self) -> str:
        """Name of the host that it runs on, where ranks run on several; "" for this one."""

    @property
    def moved(self) -> Moved:
        """Directories of this host, each with the one that stands for it where the rank runs."""

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read once the process has ended."""

    @property
    def exitcode(self) -> int | None:
        """Its exit code; None while it runs, and where it is not known."""

    @property
    def is_lost(self) -> bool:
        """Whether its host is gone, and the process with it as far as anyone knows."""

    def is_alive(self) -> bool: ...
    def join(self, timeout: float) -> None: ...

    def state(self) -> str:
        """Return the kernel's letter for what the process does, "" where it cannot be had."""

    def signal(self, number: int) -> None:
        """Send the process a signal; raise OSError if it cannot be reached."""

    def fetch(self) -> None:
        """Bring its files up to date where its spec says that they are."""

    def kill(self) -> None: ...
    def close(self) -> None: ...


class Launcher(Protocol):
    """Starts the ranks of worlds, wherever they are to run."""

    directory: str

    def prestart(self) -> None: ...
    def expect(self, module: str) -> None: ...
    def stop(self) -> None: ...
    def restore_directory(self) -> None: ...
    def start(self, specs: list[RankSpec], deadline: float) -> Sequence[StartedRank]: ...
    def forget(self, started: StartedRank) -> None: ...
    def end_world(self, directory: str) -> None: ...

    def check_code(self, path: Path, root: Path, key: WorldKey) -> None:
        """Raise LaunchError if a test file, or what it needs of the project, differs between hosts."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A started rank of this machine: its process and the controller's end of the wire."""

    process: BaseProcess | ChildProcess
    wire: Connection
    began: str
    host: str = ""
    is_lost: ClassVar[bool] = False
    moved: ClassVar[Moved] = ()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    @property
    def exitcode(self) -> int | None:
        return self.process.exitcode

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def join(self, timeout: float) -> None:
        self.process.join(timeout)

    def state(self) -> str:
        stat = stat_of(self.pid)
        return stat[0] if stat else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def fetch(self) -> None:
        """Do nothing: they are on this machine."""

    def kill(self) -> None:
        """End the process at once, with what it has started."""
        pid = self.pid
        # Spawned ranks have no server that ends what a test has put into a session of its own.
        below = with_descendants({pid}) if self.process.is_alive() else set()
        kill_group(pid, self.began)
        for each in below - {pid}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if self.process.is_alive():  # it may not lead a group of its own yet
            self.process.kill()

    def close(self) -> None:
        """Wait for the end of a killed process; close its wire."""
        self.process.join(2.0)
        self.wire.close()


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of the processes, by names: nothing of it is imported in the controller."""

    rank: str
    """`module:name` of a `bootstrap.MakeRank`."""
    modules: tuple[str, ...] = ()
    """Modules that every rank imports: the server imports them once."""
    preload: tuple[str, ...] = ()
    """Modules of the ini option `ranks_preload`: the server imports them after the others."""
    hints: tuple[str, ...] = ()
    """Modules that most tests import: the server does so last, and need not succeed."""

    def imports(self) -> dict[str, tuple[str, ...]]:
        """Return all names for the server."""
        modules = (self.rank.split(":")[0], *self.modules)
        return {"modules": modules, "preload": self.preload, "hints": self.hints}


def is_of_torch(module: str) -> bool:
    """Whether a module is a part of torch, by its name."""
    return module.split(".")[0] == "torch"


class Loan(Protocol):
    """Something of the controller for a rank, which is pickled as a `bootstrap.SentLoan`."""

    @property
    def rank(self) -> int: ...


class ProcessLauncher:
    """Starts ranks as processes of this machine.

    Args:
        start_method: "forkserver" (forks of a server that has imported torch) or "spawn" (new interpreters).

    Attributes:
        loan: What one rank of each world takes over before it runs.
        forks: Whether there is a server that has imported torch.
    """

    def __init__(self, start_method: str, program: RankProgram) -> None:
        self._context: BaseContext = multiprocessing.get_context(start_method)
        self.forks = start_method == "forkserver"
        self._program = program
        self.loan: Loan | None = None
        self._checked = False
        self._expected: set[str] = set()
        self.directory = private_directory()
        os.makedirs(f"{self.directory}/ranks", mode=0o700, exist_ok=True)

    def prestart(self) -> None:
        """Start the imports of the server, and return at once. Starts another one if it has died.

        Where ranks are spawned it imports nothing: it only cleans up after a controller that crashed.
        """
        if (pid := server_pid()) is None or _has_ended(pid):  # ranks of a dead server live on
            self._checked = False
            server.status_path(self.directory).unlink(missing_ok=True)  # of the one before, dead or stopped
        program = self._program
        setup = {
            "sys_path": sys.path,
            "imports": program.imports() if self.forks else None,
            "directory": self.directory,
            "controller": os.getpid(),
        }
        # One BLAS thread: the server must be single-threaded to be forked from.
        with pytest.MonkeyPatch.context() as environ:
            environ.setenv("OPENBLAS_NUM_THREADS", "1")
            environ.setenv(server.SETUP_VARIABLE, json.dumps(setup))
            start_server(server.__name__, server.IGNORED)

    def expect(self, module: str) -> None:
        """Let the server import one of its `SLOW_IMPORTS`, too, before it forks the first rank."""
        self._expected.add(module)

    def make_ready(self, deadline: float) -> None:
        """Start the server unless it runs, and wait until it is ready to fork.

        Args:
            deadline: moment (`time.monotonic`) at which a server that is still importing is given up.

        Raises:
            LaunchError: it did not come up, or a module of `ranks_preload` cannot be imported.
        """
        self.prestart()
        self._await_server(deadline)

    def restore_directory(self) -> None:
        """Make the directory again if it was removed; end the server, whose socket was in it."""
        if os.path.isdir(self.directory):
            return
        os.mkdir(self.directory, mode=0o700)
        os.mkdir(f"{self.directory}/ranks", mode=0o700)
        pid = server_pid()
        if pid is not None and not _has_ended(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # for multiprocessing to notice

    def start(
        self, specs: list[RankSpec], deadline: float, wires: Mapping[int, Connection] | None = None
    ) -> list[RankProcess]:
        """Start one process for each spec; return them in the same order.

        Args:
            deadline: moment (`time.monotonic`) at which a server that is still importing is given up.
            wires: by rank, its end of the wire where the other is elsewhere; it is closed here.

        Raises:
            LaunchError: the server did not come up, a module of `ranks_preload` cannot be imported, or the
                machine lacks something; none of the processes is left.
        """
        check_open_files(len(specs))
        started: list[RankProcess] = []
        try:
            self.make_ready(deadline)
            with without_main_module():
                for spec in specs:
                    started.append(self._start_one(spec, None if wires is None else wires[spec.rank]))
        except BaseException as error:
            for each in started:
                each.kill()
                each.close()
            if isinstance(error, OSError):
                raise LaunchError(explain(error)) from None
            raise
        return started

    def _start_one(self, spec: RankSpec, wire: Connection | None) -> RankProcess:
        loan = self.loan if self.loan is not None and self.loan.rank == spec.rank else None
        ours, theirs = (wire, wire) if wire is not None else self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=start_rank,
            args=(self._program.rank, spec, theirs, loan),
            name=f"rank-{spec.rank}",
            daemon=False,
        )
        try:
            process.start()
        except EOFError:
            self._await_end_of_server()
            raise LaunchError(
                f"the server that ranks are forked from died while starting rank {spec.rank}: "
                f"{server.last_words(self.directory) or 'it wrote no output'}"
            ) from None
        theirs.close()
        assert process.pid is not None
        began = start_of(process.pid)
        if not self.forks:
            return RankProcess(process, ours, began)
        if wire is not None:  # other controllers' worlds may end before it says itself that it is a rank
            Path(f"{self.directory}/ranks/{process.pid}").write_text(began)
        pid = server_pid()
        child = ChildProcess(process, lambda: server_pid() == pid and not _has_ended(pid))
        return RankProcess(child, ours, began)

    def _await_end_of_server(self) -> None:
        """Wait for a server that dies, so that the next ranks get another one."""
        until = time.monotonic() + DYING
        while not _has_ended(server_pid()) and time.monotonic() < until:
            time.sleep(0.002)

    def _await_server(self, deadline: float) -> None:
        """Wait until the server has imported everything; then read, once, how that went."""
        if not self.forks or self._checked:
            return
        path, imports = server.status_path(self.directory), ", ".join(("torch", *self._program.preload))
        while not path.exists():
            if _has_ended(server_pid()):
                raise LaunchError(f"the server that ranks are forked from died while importing {imports}")
            if time.monotonic() > deadline:
                remedy = (
                    "a machine this slow needs a higher --world-timeout"
                    if all(map(is_of_torch, self._program.preload))
                    else "look for a module in `ranks_preload` that never finishes"
                )
                raise LaunchError(
                    f"the server that ranks are forked from is still importing {imports}; {remedy}"
                )
            time.sleep(0.002)  # once a session; the server has no other way to report it
        status = json.loads(path.read_text())
        for module, error in status["failures"].items():
            raise LaunchError(f"ranks_preload: cannot import {module}: {error}")
        if status["threads"] > 1:
            raise LaunchError(
                f"the server that ranks are forked from has {status['threads']} threads after its imports; "
                "a fork would copy only one. Take the module that starts a thread out of `ranks_preload`, "
                "or set `ranks_start_method = spawn`"
            )
        self._checked = True
        needed = self._expected.union(sys.modules)
        slow, pid = [name for name in server.SLOW_IMPORTS if name in needed], server_pid()
        if slow and pid is not None:
            Path(self.directory, server.MORE_IMPORTS).write_text(json.dumps(slow))
            os.kill(pid, server.IMPORT_MORE)

    def forget(self, started: StartedRank) -> None:
        """Remove a rank that is gone, and end processes of its tests that its own end has not reached."""
        file = Path(f"{self.directory}/ranks/{started.pid}")
        with contextlib.suppress(FileNotFoundError):
            if file.read_text() in ("", started.began):  # else a rank that was started since has its number
                file.unlink()
        parent = server_pid()
        if self.forks and parent is not None:
            end(lambda: self._strays(parent), patience=0.0)

    def end_world(self, directory: str) -> None:
        """Remove the directory of a world, whose ranks are gone."""
        shutil.rmtree(directory, ignore_errors=True)

    def check_code(self, path: Path, root: Path, key: WorldKey) -> None:
        """Do nothing: there is one host."""

    def _strays(self, server_pid: int) -> set[int]:
        """Return the server's children that are no ranks; each rank has a file named after its pid."""
        try:
            ranks = {int(name) for name in os.listdir(f"{self.directory}/ranks")}
        except FileNotFoundError:  # removed: which of them are ranks is not known
            return set()
        return children_of(server_pid) - ranks

    def stop(self) -> None:
        """End the server and wait for it, so that nothing is left when pytest returns."""
        pid = server_pid()
        if pid is not None and not self._checked:
            os.kill(pid, signal.SIGKILL)  # it would finish its imports first
        stop_server()
        # multiprocessing removes it as the interpreter ends, and complains if it is gone.
        os.makedirs(self.directory, mode=0o700, exist_ok=True)


def _has_ended(pid: int | None) -> bool:
    """Whether a child process was started and has ended; it stays to be waited for."""
    if pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has been waited for
        return True
