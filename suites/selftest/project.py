"""Pytest runs over the sample projects in `projects/`: copied to a directory, started, waited for, read."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from suites.selftest.warm_pytest import WarmPopen, is_warm, run_to_end

PROJECTS = Path(__file__).parent / "projects"

WITHOUT_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "lockstep.plugin"}
"""Variables for sessions that need no installed plugin: each new rank would import all of them."""

HEADER = "import pytest\npytestmark = pytest.mark.ranks(2)\n"


def copy_project(name: str, path: Path) -> Path:
    """Copy `projects/<name>` and the module `notes` into the directory `path`, which may exist."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECTS / name, path, dirs_exist_ok=True, ignore=ignored)
    shutil.copy(PROJECTS / "notes.py", path)
    return path


def line_of(code: str, file: Path) -> int:
    """Return the number of the only line of a file that contains this code."""
    lines = enumerate(file.read_text().splitlines(), 1)
    (number,) = (number for number, line in lines if code in line)
    return number


@dataclass(frozen=True)
class Run:
    """A finished pytest run: its exit status, its output, and the cases of its XML report."""

    path: Path
    status: int
    output: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()

    @cached_property
    def suite(self) -> ElementTree.Element:
        (suite,) = ElementTree.parse(self.path / "report.xml").getroot()
        return suite

    @cached_property
    def cases(self) -> dict[str, list[ElementTree.Element]]:
        """The cases by the name of their test: a second one where its tear-down failed, too."""
        cases: dict[str, list[ElementTree.Element]] = {}
        for case in self.suite.iter("testcase"):
            cases.setdefault(case.attrib["name"], []).append(case)
        return cases

    def case(self, name: str) -> ElementTree.Element:
        (case,) = self.cases[name]
        return case

    def outcome(self, name: str) -> str:
        """Return one word, with the reason of a skip."""
        children = [child for child in self.case(name) if child.tag in ("failure", "error", "skipped")]
        skips = [f"skipped: {child.get('message')}" for child in children if child.tag == "skipped"]
        return ", ".join(skips or [child.tag for child in children]) or "passed"

    def failure(self, name: str, kind: str = "failure") -> str:
        """Return the text of the first failure, or of an error, of a test."""
        texts = [each.text or "" for case in self.cases[name] for each in case.findall(kind)]
        assert texts, self.output
        return texts[0]

    def count(self) -> str:
        """Return the last line of the output, without the time it took."""
        return re.sub(r" in [\d.]+s.*|=", "", self.lines[-1]).strip()


def run_pytest(path: Path, *args: str, cwd: str = ".", fresh: bool = False, **environ: str) -> Run:
    """Run pytest in a directory, or in `cwd` below it, with more variables in its environment."""
    arguments = (f"--junitxml={path}/report.xml", "-ra", *args)
    return Run(path, *run_to_end(arguments, path / cwd, os.environ | environ, timeout=300, fresh=fresh))


def printed_by(path: Path, module: str, *arguments: str, columns: int = 80) -> str:
    """Run a module in a directory, without installed plugins; return what it printed for so many columns."""
    environ = os.environ | WITHOUT_PLUGINS | {"COLUMNS": str(columns)}
    return run_to_end(arguments, path, environ, timeout=300, module=module)[1]


@dataclass
class Project:
    """A directory with tests, and the pytest processes started in it, which carry a mark."""

    path: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    plugins: bool = False
    """Whether pytest loads the installed plugins: each new rank would import them, too."""
    fresh: bool = False
    """Whether a session is a new interpreter, for tests of how sessions start and what they import."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.path / "tmp").mkdir()

    def copy(self, name: str, ini: str = "") -> None:
        """Copy a sample project into the directory, with lines for its pytest.ini."""
        copy_project(name, self.path)
        self.write_ini(ini)

    def write(self, tests: str, ini: str = "") -> None:
        """Write a small test file; its tests run on two ranks."""
        (self.path / "test_sample.py").write_text(HEADER + tests)
        self.write_ini(ini)

    def write_ini(self, ini: str) -> None:
        (self.path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")

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
            environ: variables in addition to those of this process.
            prepare: called in a new interpreter before it becomes pytest.
        """
        variables = self._environ(tmpdir, environ)
        is_new = self.fresh or prepare is not None or not is_warm(variables)
        process = (subprocess.Popen if is_new else WarmPopen)(
            [sys.executable, "-m", "pytest", *self._arguments(args)],
            cwd=self.path / cwd,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            preexec_fn=prepare,
            start_new_session=True,  # as a terminal's job is: a Ctrl-C reaches all of its processes
        )
        self.started.append(process)
        return process

    def run(
        self, *args: str, tmpdir: Path | None = None, environ: dict[str, str] | None = None, cwd: str = "."
    ) -> str:
        """Run pytest to its end; return what it printed."""
        variables, path = self._environ(tmpdir, environ), self.path / cwd
        arguments = self._arguments(args)
        return run_to_end(arguments, path, variables, 300, "backslashreplace", fresh=self.fresh)[1]

    def _arguments(self, args: Sequence[str]) -> list[str]:
        plugin = () if self.plugins else ("-p", "lockstep.plugin")
        return ["-p", "no:cacheprovider", "-ra", *plugin, *args]

    def _environ(self, tmpdir: Path | None, environ: dict[str, str] | None) -> dict[str, str]:
        own = {"TMPDIR": str(tmpdir or self.path / "tmp"), "LOCKSTEP_TEST_MARK": self.mark}
        if not self.plugins:
            own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        # What cannot be encoded is then escaped by who prints it, as on a terminal, and not by pytest.
        return {**os.environ, **own, **(environ or {})}

    def interrupt(self, process: subprocess.Popen[str], *signals: signal.Signals) -> str:
        """Send signals to all processes of a job, as a terminal does; return what pytest printed."""
        for number in signals:
            os.killpg(process.pid, number)
            time.sleep(0.3)
        return process.communicate(timeout=180)[0]

    def pids(self, name: str, rank: int = 0) -> list[str]:
        """Return the processes that have called `note(world, name)` on a rank."""
        path = self.path / f"{name}-{rank}.txt"
        return path.read_text().split() if path.exists() else []

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 120) -> None:
        wait_for(condition, what, seconds)

    def processes(self) -> list[int]:
        """Return the living processes that come from this project's pytest."""
        return processes_with(self.mark)

    def kill(self) -> None:
        """End what a failed test has left, so that it disturbs no other."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            with process:
                process.kill()

    def temporary_files(self) -> list[str]:
        """Return what is left in the temporary directory, except the folders that pytest keeps."""
        return [
            entry.name for entry in (self.path / "tmp").iterdir() if not entry.name.startswith("pytest-of-")
        ]

    def assert_nothing_is_left(self, seconds: float = 5) -> None:
        """Wait for the end of all processes; no temporary file stays, and no socket, which is one."""
        wait_for(lambda: not self.processes(), "no rank, server or child of a test is left", seconds)
        left = self.temporary_files()
        assert not left, left


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait for something another process does; the bound is for a machine that is busy with others."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s, without result: {what}"
        time.sleep(0.02)


def processes_with(mark: str) -> list[int]:
    """Return the living processes that have a text in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found
