"""Pytest in a fork of an interpreter that has imported torch and pytest, for sessions under test.

To import them, in the session and in the server of its ranks, takes most of the processor time of a small
session.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from suites.selftest import warm_interpreter
from suites.selftest.warm_interpreter import (
    FOR_A_SERVER,
    IMPORTED,
    LARGEST_REQUEST,
    MARK,
    NO_MARK,
    adopt_orphans,
    at_start,
)


def run_to_end(
    arguments: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    timeout: float,
    errors: str = "replace",
    fresh: bool = False,
    module: str = "pytest",
) -> tuple[int, str]:
    """Run pytest to its end in a session of processes of its own; return its exit status and output.

    Args:
        environ: the whole environment. Where it would start another interpreter, that is what runs. What is
            in `IMPORTED` has been imported in the session, and in the server of its ranks, unless `fresh`.
        errors: how output that is not UTF-8 is decoded.
        fresh: run a new interpreter, for tests of what a session imports.
        module: run another program than pytest.

    Raises:
        TimeoutError: it was killed after so many seconds.
    """
    with tempfile.TemporaryFile("w+", errors=errors) as output:
        status = _run((module, *arguments), cwd, environ, (output, output), timeout, fresh)
        output.seek(0)
        return status, output.read()


def run_module(
    module: str, *arguments: str, cwd: Path, environ: Mapping[str, str] | None = None, timeout: float = 180
) -> subprocess.CompletedProcess[str]:
    """Do as `run_to_end`, in the environment of this process where there is no other; keep errors apart."""
    environ = os.environ if environ is None else environ
    line = (module, *arguments)
    return _kept_apart(line, lambda files: _run(line, cwd, environ, files, timeout))


def _kept_apart(
    line: Sequence[str], run: Callable[[tuple[IO[str], IO[str]]], int]
) -> subprocess.CompletedProcess[str]:
    """Run a module with a file for its output, and one for its errors."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        status = run((output, errors))
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(line, status, output.read(), errors.read())


class WarmPopen(subprocess.Popen[str]):
    """A fork of the warm interpreter for arguments `[..., "-m", MODULE, ...]`, a child of this process.

    It gets the input that is given, and writes errors where it writes its output.
    """

    def _execute_child(self, args: Any, *others: Any) -> None:
        cwd, environ, given, output = others[4], others[5], others[9], others[12]
        # Ends of pipes and the null device are closed here; files are the caller's.
        pipes = {end for end, other in ((given, others[10]), (output, others[11])) if other != -1}
        streams = (output, output, *({given} - {-1}))
        module, *words = args[args.index("-m") + 1 :]
        imported, environ = _taken_from(environ)
        request = {"module": module, "arguments": words, "cwd": str(cwd), "environ": environ}
        answers, theirs = socket.socketpair()
        adopts = adopt_orphans(True)
        with theirs:
            _interpreter(os.getpid(), imported).ask({**request, "parent": os.getpid()}, theirs, *streams)
        with answers, answers.makefile("r") as lines:
            self.pid, self._child_created = int(lines.readline()), True
        adopt_orphans(adopts)
        for each in {*pipes, getattr(self, "_devnull", -1)} - {-1}:
            os.close(each)


def is_warm(environ: Mapping[str, str]) -> bool:
    """Return whether a fork of the warm interpreter is what would start in an environment."""
    imported, environ = _taken_from(environ)
    return at_start(environ) == _interpreter(os.getpid(), imported).at_start


def _taken_from(environ: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what is to be imported, and the other variables."""
    others = {name: value for name, value in environ.items() if name != IMPORTED}
    return tuple(environ.get(IMPORTED, "").split()), others


def _run(
    line: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    files: tuple[IO[str], IO[str]],
    timeout: float,
    fresh: bool = False,
) -> int:
    if not fresh and is_warm(environ):
        imported, environ = _taken_from(environ)
        return _interpreter(os.getpid(), imported).run(line, cwd, environ, files, timeout)
    _, environ = _taken_from(environ)
    return subprocess.run(
        [sys.executable, "-m", *line],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=files[0],
        stderr=files[1],
        start_new_session=True,
        timeout=timeout,
        check=False,
    ).returncode


@cache
def _interpreter(of_process: int, imported: tuple[str, ...]) -> Interpreter:
    return Interpreter(imported, _interpreter(of_process, ()) if imported else None)


class Interpreter:
    """The process that is forked. It ends when this one does, as it then reads the end of its requests.

    Args:
        imported: what it imports, instead of what sessions import, or after that, if it is a fork.
        of: an interpreter that it is a fork of.
        python: how it is started, if it is none.
    """

    def __init__(
        self,
        imported: Sequence[str] = (),
        of: Interpreter | None = None,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        self.at_start = at_start(os.environ)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        self._process: subprocess.Popen[bytes] | None = None
        with theirs:
            if of is not None:
                socket.send_fds(
                    of._requests, [json.dumps({"imported": imported}).encode()], [theirs.fileno()]
                )
            else:
                self._process = subprocess.Popen(
                    [*python, warm_interpreter.__file__, str(theirs.fileno()), *imported],
                    env={**os.environ, **FOR_A_SERVER, MARK: NO_MARK},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        atexit.register(self._end, os.getpid())

    def _end(self, of_process: int) -> None:
        if os.getpid() == of_process:
            self._requests.close()
            if self._process is not None:
                self._process.wait()

    def ask(self, request: Mapping[str, Any], answers: socket.socket, *outputs: int) -> None:
        """Send a request, with a socket for the answers, and descriptors for output and errors."""
        socket.send_fds(self._requests, [json.dumps(request).encode()], [answers.fileno(), *outputs])

    def run_module(
        self, *line: str, cwd: Path, environ: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a module with arguments in a fork; keep errors apart."""
        return _kept_apart(line, lambda files: self.run(line, cwd, environ, files, timeout))

    def run(
        self,
        line: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        files: tuple[IO[str], IO[str]],
        timeout: float,
    ) -> int:
        request = {"module": line[0], "arguments": line[1:], "cwd": str(cwd), "environ": dict(environ)}
        answers, theirs = socket.socketpair()
        with theirs:
            self.ask(request, theirs, *(each.fileno() for each in files))
        answers.settimeout(timeout)
        with answers, answers.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                return int(lines.readline())
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                raise
