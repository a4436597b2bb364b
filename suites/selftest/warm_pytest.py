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
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from suites.selftest import warm_interpreter
from suites.selftest.warm_interpreter import FOR_A_SERVER, IMPORTED, LARGEST_REQUEST, MARK, NO_MARK, at_start


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
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        status = _run(
            (module, *arguments), cwd, os.environ if environ is None else environ, (output, errors), timeout
        )
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess((module, *arguments), status, output.read(), errors.read())


def _run(
    line: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    files: tuple[IO[str], IO[str]],
    timeout: float,
    fresh: bool = False,
) -> int:
    imported = tuple(environ.get(IMPORTED, "").split())
    environ = {name: value for name, value in environ.items() if name != IMPORTED}
    if not fresh and at_start(environ) == (warm := _interpreter(os.getpid(), imported)).at_start:
        return warm.run(line, cwd, environ, files, timeout)
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
def _interpreter(of_process: int, imported: tuple[str, ...]) -> _Interpreter:
    return _Interpreter(imported, _interpreter(of_process, ()) if imported else None)


class _Interpreter:
    """The process that is forked. It ends when this one does, as it then reads the end of its requests."""

    def __init__(self, imported: Sequence[str], of: _Interpreter | None) -> None:
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
                    [sys.executable, warm_interpreter.__file__, str(theirs.fileno())],
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
            socket.send_fds(
                self._requests,
                [json.dumps(request).encode()],
                [theirs.fileno(), *(each.fileno() for each in files)],
            )
        answers.settimeout(timeout)
        with answers, answers.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                return int(lines.readline())
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                raise
