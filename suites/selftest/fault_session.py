"""Sessions full of faults: one run a test file, a healthy test after each fault, verdicts by name."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from suites.selftest.project import PROJECTS, line_of
from suites.selftest.warm_pytest import run_to_end

FAULTS = PROJECTS / "faults"


@dataclass(frozen=True)
class Verdict:
    """Outcomes and text that a session reported of one of its tests."""

    outcomes: list[str]
    message: str
    text: str
    seconds: float
    megabytes: int
    """By which the controller's peak of memory grew in it."""

    def head(self) -> list[str]:
        """Return the lines of the report before the traceback."""
        return self.text.split("\n\n")[0].splitlines()


@dataclass(frozen=True)
class FaultSession:
    """The verdicts of a session, which can be indexed by the names of its tests."""

    path: Path
    verdicts: dict[str, Verdict]
    output: str
    status: int
    backend: str

    def __getitem__(self, name: str) -> Verdict:
        return self.verdicts[name]

    def place(self, code: str) -> str:
        """Return where the only line with this code is: `file:line`."""
        return f"test_faults.py:{line_of(code, self.path / 'test_faults.py')}"

    def assert_healthy(self) -> None:
        """Check that the test after every fault has passed, and that the session ended in order."""
        faults = re.findall(r"^def (test_\w+)", (self.path / "test_faults.py").read_text(), re.MULTILINE)
        assert faults
        after = {name: self.verdicts[f"test_healthy[{name}]"].outcomes for name in faults}
        assert {name: outcomes for name, outcomes in after.items() if outcomes != ["passed"]} == {}
        assert self.status == pytest.ExitCode.TESTS_FAILED  # no internal error, no interruption


def copy_faults(name: str, path: Path) -> None:
    """Copy `projects/faults/<name>` and the modules of all faults into the directory `path`."""
    shutil.copytree(FAULTS / name, path, dirs_exist_ok=True)
    for module in FAULTS.glob("*.py"):
        shutil.copy(module, path)


def run_faults(
    name: str, path: Path, *plugins: str, backend: str = "gloo", fresh: bool = False
) -> FaultSession:
    """Run `projects/faults/<name>` in the directory `path`.

    Args:
        plugins: installed ones to load. Each of many fresh ranks would import all of them.
        backend: of tests whose mark names none.
        fresh: run a new interpreter.
    """
    copy_faults(name, path)
    loaded = [f"-p{plugin}" for plugin in plugins]
    options = ("--junitxml=report.xml", "-ra", "--world-timeout=30", f"--backend={backend}")
    # Not with -p: all installed distributions are looked through for each plugin, in each new rank.
    modules = {"PYTEST_PLUGINS": "lockstep.plugin,healthy,stopwatch"}
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | modules
    status, output = run_to_end((*loaded, *options), path, environ, timeout=300, fresh=fresh)
    return FaultSession(path, read_verdicts(path), output, status, backend)


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """Read the outcomes of a session, by the names of its tests."""
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
