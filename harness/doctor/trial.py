"""The trial of the backends: each runs a test on two ranks, with pytest and the project's configuration.

Runs in the process of the command, and starts pytest in another one; standard library only. It needs pytest
and torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from lockstep.backends import BACKENDS
from lockstep.doctor.configuration import Configuration
from lockstep.doctor.finding import Finding, note, ok, problem

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


class Trial:
    """A pytest run in a directory of its own, which is removed at the end."""

    def __init__(self, project: Configuration, plugin: str | None) -> None:
        from lockstep.features.leases.lease_store import VARIABLE, default_directory

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
            said = said.removeprefix('failed on setup with "').removesuffix('"')
            what = "\n".join([line for line in said.splitlines() if line.strip()][:6])
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
