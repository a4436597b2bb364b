"""The trial of the backends: each runs a test on two ranks, with pytest and the project's configuration.

Runs in the process of the command, and starts pytest in another one; standard library only. It needs pytest
and torch.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from harness.backends import BACKENDS
from harness.doctor.finding import Finding, note, ok, problem

WITHIN = 60
"""Seconds for all backends; each test has `DEADLINE`."""
DEADLINE = 20
_TEST = """
@pytest.mark.ranks(2, backend="{backend}"{more})
def test_{backend}(world):
    tensor = torch.full((4,), world.rank + 1.0, device="cuda" if "{backend}" == "nccl" else "cpu")
    dist.all_reduce(tensor)
    assert {claim}
"""
_HEAD = "import pytest\nimport torch\nimport torch.distributed as dist\n"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The pytest configuration file that a project's run would read, and Lockstep's options in it."""

    path: Path | None
    options: dict[str, Any]
    addopts: str = ""


def configuration(folder: Path) -> Configuration:
    """Find the configuration file that pytest reads in a folder: there or in one above."""
    for each in (folder, *folder.parents):
        for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"):
            if (each / name).is_file():
                return _read(each / name) or Configuration(each / name, {})
        for name in ("pyproject.toml", "tox.ini", "setup.cfg"):
            found = _read(each / name) if (each / name).is_file() else None
            if found is not None:
                return found
    return Configuration(None, {})


def _read(path: Path) -> Configuration | None:
    """Return the options of a file; None if it has no section for pytest, or pytest would refuse it."""
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            content = tomllib.loads(text)
            section = content.get("tool", {}) if path.name == "pyproject.toml" else content
            options = section.get("pytest")
            if options is not None and path.name == "pyproject.toml":
                options = options.get("ini_options", options)
        else:
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_string(text)
            section = "tool:pytest" if path.name == "setup.cfg" else "pytest"
            options = dict(parser[section]) if parser.has_section(section) else None
    except (OSError, ValueError, AttributeError, configparser.Error):  # the third: no table
        return None
    if not isinstance(options, dict):
        return None
    ours = {key: value for key, value in options.items() if key.startswith("ranks_")}
    return Configuration(path, ours, str(options.get("addopts", "")))


class Trial:
    """A pytest run in a directory of its own, which is removed at the end."""

    def __init__(self, project: Configuration, plugin: str | None) -> None:
        from harness.launch.lease_store import VARIABLE, default_directory

        self._directory = tempfile.TemporaryDirectory(prefix="lockstep-doctor-")
        self.path = Path(self._directory.name)
        (self.path / "test_trial.py").write_text(_HEAD + "".join(map(_test_of, BACKENDS)))
        ini = project.path
        if ini is None:  # else pytest would look for one above the directory
            ini = self.path / "pytest.ini"
            ini.write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", str(self.path / "test_trial.py"), "-c", str(ini)]
        command += ["-o", "addopts=", "-o", "ranks_wait=10", "-p", "no:cacheprovider", "-p", "no:randomly"]
        command += [f"--rootdir={self.path}", f"--confcutdir={self.path}", f"--basetemp={self.path / 'temp'}"]
        command += [f"--junitxml={self.path / 'report.xml'}", f"--world-timeout={DEADLINE}", "--tb=short"]
        environ = {key: value for key, value in os.environ.items() if key not in _NOT_OF_A_USER}
        if not (leases := default_directory()).exists():  # no run holds one, and ours shall not stay
            environ[VARIABLE] = str(self.path / leases.name)
        with (self.path / "output").open("w") as output:
            self._process = subprocess.Popen(
                [*command, *(("-p", plugin) if plugin else ())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the server ends the ranks when it notices
        self._process.wait()
        self._directory.cleanup()

    def findings(self) -> Iterator[Finding]:
        """Wait for the run; yield a finding for each backend, or one for all if there was none."""
        why = "no test on ranks can run"
        try:
            self._process.wait(WITHIN)
        except subprocess.TimeoutExpired:
            remedy = "look at what ranks wait for: `pytest --world-timeout 20` on a test of yours"
            yield problem("trial", f"pytest has not ended within {WITHIN} s{self._tail()}", why, remedy)
            return
        report = self.path / "report.xml"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        if not cases:
            what = f"pytest has run no test: exit status {self._process.returncode}{self._tail()}"
            yield problem("trial", what, why, "mend what it says; the same ends a run of your tests")
            return
        for case in cases:
            yield _of_case(case)

    def _tail(self) -> str:
        lines = (self.path / "output").read_text(errors="replace").splitlines()
        return "".join(f"\n{line}" for line in lines[-8:])


_NOT_OF_A_USER = frozenset(
    {"PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PYTEST_XDIST_WORKER"}
)


def _test_of(backend: str) -> str:
    is_fake = backend == "fake"
    more = ", as_rank=0" if is_fake else ""
    return _TEST.format(
        backend=backend, more=more, claim="world.size == 2" if is_fake else "tensor.tolist() == [3.0] * 4"
    )


def _of_case(case: ElementTree.Element) -> Finding:
    backend = case.attrib["name"].removeprefix("test_").partition("[")[0]
    name, ends = f"backend-{backend}", {child.tag: child for child in case}
    for tag in ("error", "failure"):
        if tag in ends:
            said = ends[tag].get("message") or ends[tag].text or "failed"
            what = _first_lines(said.removeprefix('failed on setup with "').removesuffix('"'))
            return problem(
                name,
                f"{backend} does not work on two ranks: {what}",
                f"tests on {backend} will fail here in the same way",
                "do what it says, or use another backend: --backend NAME",
            )
    if "skipped" in ends:
        why = "tests that name it in their mark, and runs with --backend nccl, need that"
        return note(name, f"{backend} was not tried: {ends['skipped'].get('message')}", why)
    return ok(name, f"{backend} works: two ranks, {float(case.get('time') or 0):.2f} s")


def _first_lines(text: str, most: int = 6) -> str:
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:most])


def start_method(project: Configuration) -> Finding:
    """Look at how ranks start."""
    chosen = project.options.get("ranks_start_method", "forkserver")
    if chosen == "spawn":
        what = f"spawn, set in {project.path}"
        why = "each rank is a new interpreter that imports torch: two seconds instead of 0.1"
        remedy = "take it out unless a module of yours cannot be imported before a fork"
        return note("start-method", what, why, remedy)
    return ok("start-method", "forkserver: ranks are forked from a server that has imported torch")


def configured(project: Configuration) -> Iterator[Finding]:
    """Look at the project's options that bound what can run."""
    if project.path is None:
        yield ok("configuration", "no configuration file of pytest here or above")
        return
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in sorted(project.options.items()))
    yield ok("configuration", f"{project.path}: {shown or 'no option of Lockstep'}")
    at_once = str(project.options.get("ranks_at_once", ""))
    if at_once.isdigit() and int(at_once) < 2:
        what, why = f"ranks_at_once = {at_once}", "a test on two ranks is refused"
        yield problem("ranks-at-once", what, why, f"set it to 2 or more in {project.path}")


def leases() -> Iterator[Finding]:
    """Look at the leases of ranks and GPUs that runs of this user hold now."""
    from harness.exceptions import LaunchError
    from harness.launch.lease_store import LeaseStore, default_directory

    directory = default_directory()
    if not directory.exists():
        yield ok("leases", f"none held, {directory} is not there yet")
        return
    try:
        store = LeaseStore(directory)
        with store.locked():
            held = [str(lease.request) for lease in store.read()]
    except (LaunchError, OSError) as error:
        what, _, remedy = str(error).rpartition(". ")
        why = "runs on GPUs, and with ranks_at_once, keep leases there"
        yield problem("leases", what, why, remedy or "set LOCKSTEP_LEASES to a directory of yours")
        return
    for each in held:
        yield note("lease", f"held by {each}", "a run that needs the same waits for it", "end that run")
    yield ok("leases", f"{len(held)} held, in {directory}")
