"""Sessions full of faults: one subprocess a test file, a healthy test after every fault, verdicts by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

# Comes after every fault, on the same ranks and in the same file: what the fault has left must not reach it.
HEALTHY = """

@pytest.mark.parametrize("after", {names!r})
def test_healthy(world, after):
    assert world.gather(world.rank) == [0, 1]
"""
# In the controller: seconds and growth of the peak of memory from start to end of each item. The rank's
# collection is put into the same order, though it need not be.
STOPWATCH = """
import os, resource, time
import pytest

def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

class _Stopwatch:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.start, self.peak = time.monotonic(), _peak()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        with open("measured.txt", "a") as file:
            print(nodeid.split("::")[-1], time.monotonic() - self.start, _peak() - self.peak, file=file)

def pytest_configure(config):
    if "RANK" not in os.environ:
        config.pluginmanager.register(_Stopwatch())

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    places = {item.name: place for place, item in enumerate(items)}
    items.sort(key=lambda item: places.get(item.name.removeprefix("test_healthy[").removesuffix("]"), 0))
"""


@dataclass(frozen=True)
class Verdict:
    """What a session said of one of its tests."""

    outcomes: list[str]
    message: str
    text: str
    seconds: float
    megabytes: int
    """By which the controller's peak of memory grew meanwhile."""

    def head(self) -> list[str]:
        """The lines of the report before the traceback."""
        return self.text.split("\n\n")[0].splitlines()


@dataclass(frozen=True)
class FaultSession:
    path: Path
    faults: list[str]
    verdicts: dict[str, Verdict]
    output: str
    status: int

    def __getitem__(self, name: str) -> Verdict:
        return self.verdicts[name]

    def place(self, code: str) -> str:
        """Where the only line with this code is: `file:line`."""
        lines = (self.path / "test_faults.py").read_text().splitlines()
        (number,) = (number for number, line in enumerate(lines, 1) if code in line)
        return f"test_faults.py:{number}"

    def assert_healthy(self) -> None:
        """Check that every test that came after a fault has passed, and that the session ended in order."""
        after = {name: self.verdicts[f"test_healthy[{name}]"].outcomes for name in self.faults}
        assert after
        assert {name: outcomes for name, outcomes in after.items() if outcomes != ["passed"]} == {}
        assert self.status == pytest.ExitCode.TESTS_FAILED  # no internal error, no interruption


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FaultSession:
    """One session over FAULTS of the module that asks, with HOOKS in conftest.py, and FILES beside it."""
    path = tmp_path_factory.mktemp("faults")
    faults: str = request.module.FAULTS
    names = re.findall(r"^def (test_\w+)", faults, re.MULTILINE)
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "conftest.py").write_text(STOPWATCH + getattr(request.module, "HOOKS", ""))
    (path / "test_faults.py").write_text(faults + HEALTHY.format(names=names))
    for name, text in getattr(request.module, "FILES", {}).items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--junitxml=report.xml", "-ra", "--world-timeout=30"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=path, env=environ, capture_output=True, timeout=300, check=False)
    return FaultSession(path, names, _read(path), done.stdout.decode(errors="replace"), done.returncode)


def _read(path: Path) -> dict[str, Verdict]:
    lines = (line.rsplit(" ", 2) for line in (path / "measured.txt").read_text().splitlines())
    measured = {name: (float(seconds), int(megabytes)) for name, seconds, megabytes in lines}
    children: dict[str, list[ElementTree.Element]] = {}
    for case in ElementTree.parse(path / "report.xml").iter("testcase"):  # one each for call and tear-down
        found = [child for child in case if child.tag in ("failure", "error", "skipped")]
        children.setdefault(case.attrib["name"], []).extend(found)
    return {
        name: Verdict(
            [child.tag for child in found] or ["passed"],
            "\n".join(child.attrib.get("message", "") for child in found),
            "\n".join(child.text or "" for child in found),
            *measured[name],
        )
        for name, found in children.items()
    }
