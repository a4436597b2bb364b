"""What the harness's tests of itself share: a project of their own to run pytest in, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HEADER = """
import os, pathlib, signal, time, random
import pytest, torch, torch.distributed as dist
pytestmark = pytest.mark.ranks(2)

def note(world, what):
    pathlib.Path(f"{what}-{world.rank}.txt").open("a").write(f"{os.getpid()}\\n")
"""


@dataclass
class Project:
    """A directory with a test file, and the pytest processes run in it; they carry a mark."""

    path: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    header: str = HEADER
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, tests: str, ini: str = "") -> None:
        (self.path / "test_sample.py").write_text(self.header + tests)
        (self.path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
        (self.path / "tmp").mkdir(exist_ok=True)

    def start(
        self,
        *args: str,
        tmpdir: Path | None = None,
        environ: dict[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
        cwd: str = ".",
    ) -> subprocess.Popen[str]:
        """Start pytest.

        Args:
            environ: variables beside those of this process.
            prepare: called in the new process before it becomes pytest.
        """
        mine = {"TMPDIR": str(tmpdir or self.path / "tmp"), "LOCKSTEP_TEST_MARK": self.mark}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *args]
        process = subprocess.Popen(
            command,
            cwd=self.path / cwd,
            env={**os.environ, **mine, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            preexec_fn=prepare,
            start_new_session=True,  # as a terminal's job is: a Ctrl-C reaches all of its processes
        )
        self.started.append(process)
        return process

    def run(self, *args: str, tmpdir: Path | None = None, environ: dict[str, str] | None = None) -> str:
        """Run pytest to its end; return what it printed."""
        process = self.start(*args, tmpdir=tmpdir, environ=environ)
        return process.communicate(timeout=120)[0]

    def break_off(self, process: subprocess.Popen[str], *signals: signal.Signals) -> str:
        """Send signals to all processes of a job, as a terminal does; return what pytest printed."""
        for number in signals:
            os.killpg(process.pid, number)
            time.sleep(0.3)
        return process.communicate(timeout=60)[0]

    def pids(self, what: str, rank: int = 0) -> list[str]:
        path = self.path / f"{what}-{rank}.txt"
        return path.read_text().split() if path.exists() else []

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60) -> None:
        """Wait for something another process does; the bound is for a machine that is busy with others."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """The living processes that come from this project's pytest."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End what a failed test has left, so that it disturbs no other."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            with process:
                process.kill()

    def temporary_files(self) -> list[str]:
        """What is left in the temporary directory, beside the folders that pytest keeps for the user."""
        return [
            entry.name for entry in (self.path / "tmp").iterdir() if not entry.name.startswith("pytest-of-")
        ]

    def assert_nothing_is_left(self, seconds: float = 5) -> None:
        """Wait for the end of all processes; no temporary file stays, and no socket, which is one."""
        self.until(lambda: not self.processes(), "no rank, server or child of a test is left", seconds)
        assert self.temporary_files() == []


@pytest.fixture
def project() -> Iterator[Project]:
    # Not under `tmp_path`, which is deep under pytest-xdist: files are looked for where they usually are.
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as path:
        project = Project(Path(path))
        yield project
        project.kill()
