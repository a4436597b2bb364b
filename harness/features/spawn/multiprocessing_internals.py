"""Private names of multiprocessing by which the server forks a process of a test. Seen in Python 3.11, 3.14.

Used in the controller and in the processes of tests; standard library only. If one moves: `Popen` of
`popen_forkserver.py` is what starts a process, `_serve_one` of `forkserver.py` what the server's fork does.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import socket
import sys
import types
from collections.abc import Callable, Iterator
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from multiprocessing.process import BaseProcess
from typing import Any, Protocol
from unittest import mock

MAX_DESCRIPTORS = forkserver.MAXFDS_TO_SEND - 8
"""Number of file descriptors that the server takes for one process, with room for its own."""
_server: Any = forkserver._forkserver
_base: Any = popen_forkserver.Popen
_spawn_popen: Any = popen_spawn_posix.Popen
_tracker: Any = resource_tracker
_util: Any = util


BOOTSTRAP = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
"""The code that runs a process, and prints the exception that ends it."""
_EXITCODE = BaseProcess.exitcode.fget.__code__  # type: ignore[attr-defined]


class Origin(Protocol):
    """The process that starts another one, as far as that takes part."""

    @property
    def key(self) -> bytes | None:
        """Key of the server's socket; None where it wants none."""

    def descriptors(self) -> list[int]:
        """Return descriptors of this process that the new one gets first of all."""

    def setup(self, method: str) -> object:
        """Return what is unpickled before all else in the new process, and makes it ready."""

    def program(self, process: BaseProcess, method: str) -> object:
        """Return an object for the new process that has the method `_bootstrap` of a process."""

    def awaited(self, pid: int, sentinel: int) -> None:
        """Called before this process waits without a limit for another one."""

    def began(self, pid: int) -> None: ...
    def ended(self, pid: int, exitcode: int) -> None: ...


class TooManyDescriptors(Exception):
    """The arguments of a process have more file descriptors than the server takes."""


class ForkedPopen(_base):  # type: ignore[misc]
    """A process that the server has forked, in the place of one that `multiprocessing` would have started."""

    def __init__(self, process: BaseProcess, method: str, origin: Origin) -> None:
        self.method = method
        self.was_read = self.was_signalled = False
        self._origin = origin
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        ready, ready_end = os.pipe()
        self._fds = [ready_end, *self._origin.descriptors()]
        try:
            self._send(process)
        finally:
            os.close(ready_end)
            with os.fdopen(ready, "rb", 0) as pipe:
                pipe.read(1)  # until then the new process ignores what the server does
        self._origin.began(self.pid)

    def _send(self, process: BaseProcess) -> None:
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            name: str = process.name
            reduction.dump(Preparation(self._origin.setup(self.method), _preparation_data(name)), data)
            reduction.dump(self._origin.program(process, self.method), data)
        finally:
            context.set_spawning_popen(None)
        if len(self._fds) > MAX_DESCRIPTORS:
            raise TooManyDescriptors(f"its arguments have {len(self._fds)} file descriptors")
        self.sentinel, data_end = _request_fork(self._fds, self._origin.key)
        alive_end = os.dup(data_end)  # by which the new process sees that this one has ended
        self.finalizer = util.Finalize(self, _util.close_fds, (alive_end, self.sentinel))
        with contextlib.suppress(BrokenPipeError), open(data_end, "wb") as pipe:  # it has ended already
            pipe.write(data.getbuffer())
        self.pid: int = forkserver.read_signed(self.sentinel)

    def _send_signal(self, number: int) -> None:
        self.was_signalled = True
        super()._send_signal(number)

    def wait(self, timeout: float | None = None) -> int | None:
        __tracebackhide__ = True
        if timeout is None and self.returncode is None:
            self._origin.awaited(self.pid, self.sentinel)
        code: int | None = super().wait(timeout)
        return code

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        self.was_read |= sys._getframe(1).f_code is _EXITCODE
        was_known = self.returncode is not None
        code: int | None = super().poll(flag)
        if code is not None and not was_known:
            self._origin.ended(self.pid, code)
        return code


class Preparation:
    """The data that `spawn.prepare` gets in the new process, once that is ready to be prepared."""

    def __init__(self, setup: object, data: dict[str, Any]) -> None:
        self._setup = setup
        self._data = data

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return _prepared, (self._setup, self._data)  # pickle makes the arguments from left to right


def _prepared(_: object, data: dict[str, Any]) -> dict[str, Any]:
    return data


def _preparation_data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = spawn.get_preparation_data(name)
    return data


def server_key() -> bytes | None:
    """Return, in the process that has started the server, the key that it wants to be shown.

    None before Python 3.14. Forks of the server do not know it.
    """
    key: bytes | None = getattr(_server, "_forkserver_authkey", None)
    return key


def _request_fork(descriptors: list[int], key: bytes | None) -> tuple[int, int]:
    """Have the server fork; return the pipe in which it answers, and the one that the new process reads."""
    with socket.socket(socket.AF_UNIX) as client, contextlib.ExitStack() as ours:
        client.connect(_server._forkserver_address)
        if key is not None:
            with connection.Connection(os.dup(client.fileno())) as authenticated:
                connection.answer_challenge(authenticated, key)
                connection.deliver_challenge(authenticated, key)
        answer, status = os.pipe()
        source, sink = os.pipe()
        for each in (status, source):
            ours.callback(os.close, each)
        try:
            # The third keeps a server of `multiprocessing` alive; the new process closes it.
            given = [source, status, source, _tracker.getfd(), *descriptors]
            reduction.sendfds(client, given)
        except BaseException:
            os.close(answer)
            os.close(sink)
            raise
        return answer, sink


def inherited_descriptors() -> list[int]:
    """Return, in a process that the server has forked, the descriptors that were sent with the request."""
    found: list[int] | None = forkserver.get_inherited_fds()
    return found or []


def start_new_interpreter(process: BaseProcess) -> Any:
    """Start a process as `multiprocessing` does for the context "spawn"."""
    return _spawn_popen(process)


StartProcess = Callable[[BaseProcess, str], Any]
"""Starts a process for a start method, spawn or forkserver; returns its `Popen`."""


@contextlib.contextmanager
def processes_started_by(start: StartProcess) -> Iterator[None]:
    """Start processes of the contexts spawn and forkserver by another function."""
    with mock.patch.object(popen_spawn_posix, "Popen"), mock.patch.object(popen_forkserver, "Popen"):
        start_processes_by(start)
        yield


@contextlib.contextmanager
def processes_not_replaced() -> Iterator[None]:
    """Start processes as `multiprocessing` does, ranks for example, inside of `processes_started_by`."""
    with (
        mock.patch.object(popen_spawn_posix, "Popen", _spawn_popen),
        mock.patch.object(popen_forkserver, "Popen", _base),
    ):
        yield


def start_processes_by(start: StartProcess) -> None:
    """Start processes of both contexts by another function, from now on.

    Wherever a test has its names from: the contexts look the class up when a process starts.
    """
    vars(popen_spawn_posix)["Popen"] = lambda process: start(process, "spawn")
    vars(popen_forkserver)["Popen"] = lambda process: start(process, "forkserver")


def target_of(process: BaseProcess) -> tuple[Callable[..., object] | None, tuple[Any, ...]]:
    """Return the function and the arguments of a process that is being started; later it has neither."""
    target, args = process._target, process._args  # type: ignore[attr-defined]
    return target, args


def exit_code_of(process: BaseProcess) -> int | None:
    """Return the exit code of a process of this one, None while it runs, or once it was closed."""
    popen: Any = process._popen  # type: ignore[attr-defined]
    code: int | None = None if popen is None else popen.poll()
    return code


def start_method_of(process: BaseProcess) -> str:
    """Return the method by which a process of this one was started; "" once it was closed."""
    popen: Any = process._popen  # type: ignore[attr-defined]
    return "" if popen is None else str(popen.method)


def is_unseen(process: BaseProcess) -> bool:
    """Whether a process that the server has forked has ended by itself, and its exit code was not read."""
    popen: Any = process._popen  # type: ignore[attr-defined]
    return isinstance(popen, ForkedPopen) and not (popen.was_read or popen.was_signalled)


def bootstrap(process: BaseProcess, parent_sentinel: int) -> int:
    """Run a process object in the process that was started for it; return the exit code."""
    code: int = process._bootstrap(parent_sentinel)  # type: ignore[attr-defined]
    return code


def end_pools() -> None:
    """End the pools and managers of this process, as the end of the interpreter would.

    A pool of which a process is killed while it waits for work cannot be ended any more.
    """
    _util._run_finalizers(0)


_COPIED = (types.MethodType, functools.partial, type(list.append), type(int.__add__))
"""Types that `multiprocessing` pickles in a way of its own, but by value."""


def shares_state(kind: type) -> bool:
    """Return whether processes that are given a value of a type share it: a tensor, or the end of a pipe."""
    return kind in reduction.ForkingPickler._extra_reducers and kind not in _COPIED  # type: ignore[attr-defined]


def flush_streams() -> None:
    """Flush stdout and stderr where they are open."""
    _util._flush_std_streams()
