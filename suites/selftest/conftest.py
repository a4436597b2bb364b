"""What the harness's tests of itself share: a project to run pytest in, and sessions full of faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import pytest

from suites.selftest.fault_session import FaultSession, run_faults
from suites.selftest.project import copy_project

# What would make a session under test do another thing here than elsewhere.
AROUND = {
    "PYTEST_ADDOPTS",
    "PYTHONDONTWRITEBYTECODE",  # each rank would compile test files for itself
    "PYTHONUNBUFFERED",
    "TOX_ENV_DIR",  # where pytest then keeps its cache, the same for all projects
    # By one of these Hypothesis sees that it runs in CI: it then draws the same examples every time and
    # keeps none; pytest shows long differences in full.
    *("CI", "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI", "BUILD_NUMBER", "BUILDKITE", "bamboo.buildKey"),
    *("CIRCLECI", "CIRRUS_CI", "CODEBUILD_BUILD_ID", "GITHUB_ACTIONS", "GITLAB_CI", "HEROKU_TEST_RUN_ID"),
    *("TEAMCITY_VERSION", "TF_BUILD"),
}

QUICK = "ranks_preload =\n"
"""For a session whose tests need no more of torch than ranks do: half a second less of imports."""

HEADER = """
import os, pathlib, signal, time, random
import pytest
if "RANK" in os.environ:  # a controller collects without: to import it takes as long as all else it does
    import torch, torch.distributed as dist
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
    plugins: bool = False
    """Whether pytest loads those that happen to be installed: each new rank would import them, too."""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def write(self, tests: str, ini: str = "") -> None:
        (self.path / "test_sample.py").write_text(self.header + tests)
        preload = "" if "ranks_preload" in ini else QUICK
        (self.path / "pytest.ini").write_text(f"[pytest]\n{preload}{ini}\n")
        (self.path / "tmp").mkdir(exist_ok=True)

    def copy(self, name: str, ini: str = "") -> None:
        """Copy a sample project into the directory, with lines for its pytest.ini."""
        self.write("", ini)
        copy_project(name, self.path)

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
        if not self.plugins:
            mine["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            args = ("-p", "harness.plugin", *args)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *args]
        process = subprocess.Popen(
            command,
            cwd=self.path / cwd,
            # What cannot be encoded is then escaped by who prints it, as on a terminal, and not by pytest.
            env={**os.environ, "PYTHONIOENCODING": "", **mine, **(environ or {})},
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


@pytest.fixture(scope="module", autouse=True)
def nothing_around() -> Iterator[None]:
    """Let sessions under test have the same environment wherever they run, and heed Ctrl-C."""
    if "RANK" in os.environ:  # there it would be a change that the first test leaves
        yield
        return
    in_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a shell's doing, which all inherit
    if in_background:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in AROUND:
            patch.delenv(name, raising=False)
        yield
    if in_background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def made_project() -> Iterator[Project]:
    # Not under `tmp_path`, which is deep under pytest-xdist: files are looked for where they usually are.
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as path:
        project = Project(Path(path))
        yield project
        project.kill()


@pytest.fixture
def project() -> Iterator[Project]:
    with made_project() as project:
        yield project


@pytest.fixture(scope="module")
def shared_project() -> Iterator[Project]:
    """One for several tests, which look at one session from different sides."""
    with made_project() as project:
        yield project


@dataclass(frozen=True)
class Run:
    """A pytest run that is over: what it printed, and what its XML report says of each test."""

    path: Path
    output: str
    cases: dict[str, ElementTree.Element]

    def outcome(self, name: str) -> str:
        """One word, and the reason of a skip."""
        children = [child for child in self.cases[name] if child.tag in ("failure", "error", "skipped")]
        skips = [f"skipped: {child.get('message')}" for child in children if child.tag == "skipped"]
        return ", ".join(skips or [child.tag for child in children]) or "passed"

    def count(self) -> str:
        """The last line of pytest's output, without the time it took."""
        return re.sub(r" in [\d.]+s.*|=", "", self.output.splitlines()[-1]).strip()


@pytest.fixture(scope="session")
def run_pytest() -> Callable[..., Run]:
    """Run pytest with arguments in a directory, or in `cwd` below it, with more in its environment."""

    def run(path: Path, *args: str, cwd: str = ".", **environ: str) -> Run:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={path}/report.xml", "-ra", *args],
            cwd=path / cwd,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        cases = ElementTree.parse(path / "report.xml").iter("testcase")
        return Run(path, done.stdout, {case.attrib["name"]: case for case in cases})

    return run


@pytest.fixture(scope="module")
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultSession]:
    """One session over the project FAULTS of the requesting module, with the plugins of its PLUGINS.

    At the end, the test that came after each fault must have passed on the same ranks.
    """
    plugins = getattr(request.module, "PLUGINS", ())
    session = run_faults(request.module.FAULTS, tmp_path_factory.mktemp("faults"), *plugins)
    yield session
    session.assert_healthy()
