"""One attempt of a user with bad input, how it ended, and what is wrong with that end."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import reprlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from suites.selftest.shared_memory import left_in_shared_memory, names_in_shared_memory
from suites.selftest.warm_interpreter import FOR_A_SERVER, OF_SESSIONS

PROJECT = Path(__file__).parents[3]
SECONDS, RANKS = 60.0, 120.0
"""The time that an attempt may take, and one that starts ranks: a quiet machine needs 0.1 s, and 3 s."""
PEAK_MIB = 950 if any("cuda" in each for each in requires("torch") or ()) else 700
"""The memory that each process may use at its peak; a rank has about 280, and with torch for CUDA 840."""
FIFO = None
"""Stands for the contents of a file that is a FIFO, which no process writes to."""

OURS = re.compile(r"(?:harness|lockstep)/[\w/]+\.py")
_NATIVE = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)*.*", re.MULTILINE)
_FRAME = re.compile(r"^(\S+\.py):\d+: (?:in .*|\w+)$")


@dataclass(frozen=True, repr=False)
class Attempt:
    """The input of a user.

    Attributes:
        command: what follows `python -m`.
        files: the contents of each file by its path, which ends in "/" for a folder; `FIFO` for a FIFO.
        environ: variables in addition to those of this process.
        locked: files that another process has locked, as a living rank has its lease.
        temporary: the name of the folder for temporary files.
        seconds: the time that it may take.
    """

    command: tuple[str, ...]
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    temporary: str = "tmp"
    seconds: float = SECONDS

    def __repr__(self) -> str:
        short = reprlib.Repr()
        short.maxstring = short.maxother = 1000
        short.maxdict = short.maxtuple = 50
        texts = (f"{each.name}={short.repr(getattr(self, each.name))}" for each in fields(self))
        return f"Attempt({', '.join(texts)})"


@dataclass(frozen=True)
class Ended:
    """The end of an attempt.

    Attributes:
        status: the exit status; negative for a signal.
        output: what was printed.
        hung: whether it had to be killed.
        peak_mib: the peak of the resident memory of that process which had most.
        left: processes and files that stayed.
        seconds: from its start to the end of the last process.
    """

    status: int
    output: str
    hung: bool = False
    peak_mib: int = 0
    left: tuple[str, ...] = ()
    seconds: float = 0.0

    def problems(self) -> list[str]:
        """Return what is wrong; nothing where a sentence and an exit status were the answer."""
        found = []
        if self.hung:
            found.append("it hung")
        elif self.status < 0 or self.status == 3:  # pytest's INTERNAL_ERROR
            found.append(f"its exit status is {self.status}")
        if "INTERNALERROR" in self.output:
            found.append("pytest reports an INTERNALERROR")
        found += [f"a traceback of ours: {each}" for each in tracebacks(self.output)]
        if self.peak_mib > PEAK_MIB:
            found.append(f"a process used {self.peak_mib} MiB")
        return found + [f"left behind: {each}" for each in self.left]


def tracebacks(output: str) -> list[str]:
    """Return the last line of each traceback through the harness that no test of the user's has raised.

    Python's own ones count wherever they show the harness. One of pytest's (`--tb=short`) counts where it
    ends inside the harness, or in what that called, unless the harness has raised the error itself: then it
    is a sentence.
    """
    native = [match[0] for match in _NATIVE.finditer(output) if OURS.search(match[0])]
    found = [text.rstrip().rpartition("\n")[2].strip() for text in native]
    frames: list[tuple[str, str]] = []
    for line, following in itertools.pairwise([*output.splitlines(), ""]):
        if _FRAME.match(line):
            frames.append((line, following))
        elif line.startswith("E  "):
            while (frames and "site-packages/" in frames[-1][0]) or (
                frames and "/lib/python" in frames[-1][0]
            ):
                frames.pop()
            if frames and OURS.search(frames[-1][0]) and not frames[-1][1].lstrip().startswith("raise "):
                found.append(f"{line[1:].strip()} at {frames[-1][0]}")
            frames = []
        elif not line.startswith("    "):
            frames = []
    return found


class Supervisor:
    """The processes that run attempts, one with torch for those that start ranks, and their directories."""

    def __init__(self) -> None:
        self._process, self._with_torch = (
            subprocess.Popen(
                [sys.executable, "-m", "suites.selftest.bad_input.supervisor", *imported],
                cwd=PROJECT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **FOR_A_SERVER, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            )
            for imported in ((), ("pytest", "torch", "torch._dynamo", "lockstep.plugin", *OF_SESSIONS))
        )

    def close(self) -> None:
        for process in (self._process, self._with_torch):
            process.communicate(timeout=SECONDS)

    def run(self, attempt: Attempt) -> Ended:
        """Make an attempt in a directory of its own."""
        with tempfile.TemporaryDirectory(prefix="lockstep-bad-", ignore_cleanup_errors=True) as name:
            place, temporary = Path(name, "project"), Path(name, attempt.temporary)
            for path in (place, temporary):
                path.mkdir()
            _write(attempt.files, place)
            shared = names_in_shared_memory()
            with _locked(place / file for file in attempt.locked):
                order = {
                    "command": attempt.command,
                    "environ": {**attempt.environ, "TMPDIR": str(temporary)},
                    "cwd": str(place),
                    "output": str(Path(name, "output")),
                    "seconds": attempt.seconds,
                }
                answer = _ask(self._with_torch if attempt.seconds == RANKS else self._process, order)
            left = [*answer.pop("left"), *_left_in(temporary), *left_in_shared_memory(shared)]
            output = Path(name, "output").read_text(errors="replace").replace(name, "DIRECTORY")
        return Ended(output=output, left=tuple(left), **answer)


def _ask(process: subprocess.Popen[str], order: Mapping[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def _write(files: Mapping[str, str | bytes | None], place: Path) -> None:
    for name, contents in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif contents is FIFO:
            os.mkfifo(path)
        else:
            assert contents is not None
            path.write_bytes(contents.encode() if isinstance(contents, str) else contents)


@contextlib.contextmanager
def _locked(paths: Iterator[Path]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for path in paths:
            descriptor = os.open(path, os.O_RDWR)  # of a FIFO, too, this does not wait
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield


def _left_in(temporary: Path) -> list[str]:
    """Return what is left in a temporary directory, but for what pytest, leases and torch keep there."""
    kept = ("pytest-of-", f"lockstep-{os.getuid()}", "torchinductor_")
    return [name for name in os.listdir(temporary) if not name.startswith(kept)]
