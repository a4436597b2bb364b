"""Pytest in a fork of an interpreter that has imported torch and pytest, for sessions under test.

To import them takes most of the processor time of a small session: as a program this file is an interpreter
that imports them once and is then forked for each session. A session finds nothing else imported; directory,
environment, arguments and descriptors are as `python -m pytest` has them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

READ_AT_START = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "CUDA_")
"""What names of variables begin with that matter when an interpreter starts, or imports torch."""
LARGEST_REQUEST = 2**20


def run_to_end(
    arguments: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str],
    timeout: float,
    errors: str = "replace",
    fresh: bool = False,
) -> tuple[int, str]:
    """Run pytest to its end in a session of processes of its own; return its exit status and output.

    Args:
        environ: the whole environment. Where it would start another interpreter, that is what runs.
        errors: how output that is not UTF-8 is decoded.
        fresh: run a new interpreter, for tests of what a session imports.

    Raises:
        TimeoutError: it was killed after so many seconds.
    """
    with tempfile.TemporaryFile("w+", errors=errors) as output:
        if not fresh and _at_start(environ) == (warm := _interpreter(os.getpid())).at_start:
            status = warm.run(arguments, cwd, environ, output.fileno(), timeout)
        else:
            status = subprocess.run(
                [sys.executable, "-m", "pytest", *arguments],
                cwd=cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                timeout=timeout,
                check=False,
            ).returncode
        output.seek(0)
        return status, output.read()


def _at_start(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(READ_AT_START) and value}


@cache
def _interpreter(of_process: int) -> _Interpreter:
    return _Interpreter()


class _Interpreter:
    """The process that is forked. It ends when this one does, as it then reads the end of its requests."""

    def __init__(self) -> None:
        self.at_start = _at_start(os.environ)
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def run(
        self,
        arguments: Sequence[str],
        cwd: Path,
        environ: Mapping[str, str],
        output: int,
        timeout: float,
    ) -> int:
        request = {"arguments": list(arguments), "cwd": str(cwd), "environ": dict(environ)}
        answers, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno(), output])
        answers.settimeout(timeout)
        with answers, answers.makefile("r") as lines:
            pid = int(lines.readline())
            try:
                return int(lines.readline())
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                raise


def _serve(requests: socket.socket) -> None:
    """Fork for each request, until there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(json.loads(message), *descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)


def _watch(request: dict[str, object], answers: int, output: int) -> None:
    """Run a session in one more fork, and answer with its process id and its exit status."""
    pid = os.fork()
    if pid == 0:
        os.close(answers)
        _become_pytest(output, **request)
        return
    os.close(output)
    os.write(answers, f"{pid}\n".encode())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answers, f"{status}\n".encode())
    os._exit(0)


def _become_pytest(output: int, arguments: list[str], cwd: str, environ: dict[str, str]) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    sys.argv = ["-m", *arguments]
    sys.path[0] = cwd
    # What `python -m` calls.
    runpy._run_module_as_main("pytest")


if __name__ == "__main__":
    import pytest  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
