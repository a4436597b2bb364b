"""The launcher `processes`: ranks forked from a preloaded server, or spawned, by `multiprocessing`.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.exceptions import LaunchError
from harness.launch import server
from harness.launch.limits import check_open_files, explain
from harness.launch.terminal import Terminal
from harness.process_tree import children_of, end, with_descendants
from harness.protocol import RankSpec

START_METHODS = ("forkserver", "spawn")
MOST_OF_TMPDIR = 70
"""Characters. A socket's path has at most 107, of which multiprocessing's own names take 32."""
UNKNOWN = 255
"""What multiprocessing takes for the exit code when the server is gone, and nobody can tell it."""


class ChildProcess:
    """A process as its grandparent sees it: the part of `multiprocessing.Process` that a world uses.

    multiprocessing learns of its end from the server, and takes the end of the server for that of every
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
        """Wait `timeout` seconds at most for its end, and for the server to tell its exit code."""
        if wait([self.sentinel], timeout):
            self._process.join(1.0)

    @property
    def exitcode(self) -> int | None:
        """Its exit code; None while it lives, and where only a server that is gone could tell."""
        if self.is_alive():
            return None
        code = self._process.exitcode
        return None if code == UNKNOWN and not self._has_server() else code

    def kill(self) -> None:
        if self._descriptor is None:
            self._process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile, and has been waited for
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A started rank: its process and the controller's end of the wire."""

    process: BaseProcess | ChildProcess
    wire: Connection

    def kill(self) -> None:
        """End the process at once, with what it has started."""
        pid = self.process.pid
        if pid is None:
            return
        # Spawned ranks have no server that looks after what a test has put into a session of its own.
        below = with_descendants({pid}) if self.process.is_alive() else set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for each in below - {pid}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        if self.process.is_alive():  # it may not lead a group of its own yet
            self.process.kill()

    def close(self) -> None:
        """Wait for the end of a killed process; give back what it takes here."""
        self.process.join(2.0)
        self.wire.close()


def is_of_torch(module: str) -> bool:
    """Tell whether a module is a part of torch, by its name."""
    return module.split(".")[0] == "torch"


class ProcessLauncher:
    """Starts ranks as processes of this machine.

    Args:
        start_method: "forkserver" (forks of a server that has imported torch) or "spawn" (new interpreters).
        preload: modules that the server imports beside torch and pytest.
        terminal: what one rank of each world gets as its standard streams.
    """

    def __init__(self, start_method: str, preload: tuple[str, ...], terminal: Terminal | None = None) -> None:
        self._context: BaseContext = multiprocessing.get_context(start_method)
        self._forks = start_method == "forkserver"
        self._preload = preload
        self._terminal = terminal
        self._checked = False
        # multiprocessing makes this directory (mode 0700), keeps the server's socket in it and removes it.
        with _short_temporary_directory():
            self.directory = util.get_temp_dir()
        os.makedirs(f"{self.directory}/ranks", mode=0o700, exist_ok=True)

    def prestart(self) -> None:
        """Let the server begin its imports, and return at once. Starts it anew if it has died.

        Where ranks are spawned it imports nothing: it only looks after what a crashed controller leaves.
        """
        self._forget_dead_server()
        setup = {
            "sys_path": sys.path,
            "modules": self._preload if self._forks else None,
            "directory": self.directory,
            "controller": os.getpid(),
        }
        # One BLAS thread: the server must be single-threaded to be forked from.
        environ = {"OPENBLAS_NUM_THREADS": "1", server.SETUP_VARIABLE: json.dumps(setup)}
        forkserver.set_forkserver_preload([server.__name__])
        with _environment(environ), _no_main_module(), _signals_held_back():
            forkserver.ensure_running()

    def restore_directory(self) -> None:
        """Make the directory anew if somebody has removed it; end the server, whose socket was in it."""
        if os.path.isdir(self.directory):
            return
        os.mkdir(self.directory, mode=0o700)
        os.mkdir(f"{self.directory}/ranks", mode=0o700)
        pid = _running_server()._forkserver_pid
        if pid is not None and not _has_ended(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # for multiprocessing to notice

    def _forget_dead_server(self) -> None:
        """Wait for the imports of the next server anew. Ranks of a dead one live on."""
        pid = _running_server()._forkserver_pid
        if pid is not None and _has_ended(pid):
            self._checked = False
            server.status_path(self.directory).unlink(missing_ok=True)

    def start(self, specs: list[RankSpec], deadline: float) -> list[RankProcess]:
        """Start one process for each spec; return them in the same order.

        Args:
            deadline: moment (`time.monotonic`) at which a server that is still importing is given up.

        Raises:
            LaunchError: the server did not come up, a module of `ranks_preload` cannot be imported, or the
                machine lacks something; none of the processes is left.
        """
        check_open_files(len(specs))
        started: list[RankProcess] = []
        try:
            self.prestart()
            self._await_server(deadline)
            with _no_main_module():
                for spec in specs:
                    started.append(self._start_one(spec))
        except BaseException as error:
            for each in started:
                each.kill()
                each.close()
            if isinstance(error, OSError):
                raise LaunchError(explain(error)) from None
            raise
        return started

    def _start_one(self, spec: RankSpec) -> RankProcess:
        from harness.launch.bootstrap import become_rank

        terminal = self._terminal if self._terminal and self._terminal.rank == spec.rank else None
        ours, theirs = self._context.Pipe()
        process = self._context.Process(  # type: ignore[attr-defined]
            target=become_rank, args=(spec, theirs, terminal), name=f"rank-{spec.rank}", daemon=False
        )
        try:
            process.start()
        except EOFError:
            raise LaunchError(
                f"the server that ranks are forked from died while starting rank {spec.rank}: "
                f"{server.last_words(self.directory) or 'it wrote no output'}"
            ) from None
        theirs.close()
        if not self._forks:
            return RankProcess(process, ours)
        return RankProcess(ChildProcess(process, _is_running(_running_server()._forkserver_pid)), ours)

    def _await_server(self, deadline: float) -> None:
        """Wait until the server has imported everything; then look, once, at what it says of that."""
        if not self._forks or self._checked:
            return
        path, imports = server.status_path(self.directory), ", ".join(("torch", *self._preload))
        while not path.exists():
            if _has_ended(_running_server()._forkserver_pid):
                raise LaunchError(f"the server that ranks are forked from died while importing {imports}")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the server that ranks are forked from is still importing {imports}; {self._cure()}"
                )
            time.sleep(0.002)  # once a session; the server has no other way to tell
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

    def _cure(self) -> str:
        if not all(map(is_of_torch, self._preload)):
            return "look for a module in `ranks_preload` that never finishes"
        return "a machine this slow needs a higher --world-timeout"

    def forget(self, pid: int) -> None:
        """Note that a rank is gone, and end what its tests have put out of reach of the rank's own end."""
        Path(f"{self.directory}/ranks/{pid}").unlink(missing_ok=True)
        if self._forks and (server_pid := _running_server()._forkserver_pid) is not None:
            end(lambda: self._strays(server_pid), patience=0.0)

    def _strays(self, server_pid: int) -> set[int]:
        """Return the server's children that are no ranks; ranks, of whatever world, note it as they start."""
        try:
            ranks = {int(name) for name in os.listdir(f"{self.directory}/ranks")}
        except FileNotFoundError:  # somebody has cleaned it away: nobody knows which are ranks
            return set()
        return children_of(server_pid) - ranks

    def stop(self) -> None:
        """End the server and wait for it, so that nothing is left when pytest returns."""
        # multiprocessing has no public way to end it before the interpreter ends.
        running = _running_server()
        if running._forkserver_pid is not None and not self._checked:
            os.kill(running._forkserver_pid, signal.SIGKILL)  # it would finish its imports first
        with contextlib.suppress(FileNotFoundError):  # the server has removed its socket with the directory
            running._stop()
        # multiprocessing removes it as the interpreter ends, and complains if it is gone.
        os.makedirs(self.directory, mode=0o700, exist_ok=True)


def _running_server() -> Any:
    """multiprocessing's own handle on the one server of this process."""
    return forkserver._forkserver


def _has_ended(pid: int) -> bool:
    """Whether a child process has ended; it stays to be waited for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has been waited for
        return True


def _is_running(pid: int) -> Callable[[], bool]:
    """Return a test whether the server of now is still the one that runs."""
    return lambda: _running_server()._forkserver_pid == pid and not _has_ended(pid)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block what the server will ignore, for what it starts with; it unblocks when it ignores."""
    resource_tracker.ensure_running()  # of multiprocessing: it would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, server.IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _short_temporary_directory() -> Iterator[None]:
    """Use /tmp where TMPDIR is so deep that a socket in it would have too long a name to be bound."""
    chosen = tempfile.gettempdir()
    if len(chosen) > MOST_OF_TMPDIR:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = chosen


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep multiprocessing from importing the controller's main script in each new process.

    Ranks need nothing of it, and a script that calls `pytest.main()` unguarded would run itself again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
