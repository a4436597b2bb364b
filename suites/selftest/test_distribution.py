"""The wheel and the sdist: what they hold, and the suites as they are installed.

Both are built from the files of this checkout. The wheel is installed, without what it depends on, into an
environment that finds the rest in this one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest

import lockstep
from harness.conformance.stored import load
from harness.conformance.table import Outcome

CHECKOUT = Path(lockstep.__file__).parents[1]
SAMPLE = Path(__file__).parent / "conformance" / "sample_engine.py"
SHIPPED = ("harness", "lockstep", "suites", "pyproject.toml", "README.md", "LICENSE")
FILE = "suites/mixed_precision/test_numerics.py"
BROKEN = "test_low_precision_gradients_are_summed_in_fp32_by_rank[NO_SHARD-flat-fp16-2-ranks]"


def sources() -> Iterator[str]:
    """Yield the files that are to be installed, by their path in the wheel."""
    for folder in ("harness", "lockstep", "suites"):
        for path in (CHECKOUT / folder).rglob("*"):
            name = path.relative_to(CHECKOUT).as_posix()
            if (
                path.is_file()
                and "__pycache__" not in name
                and not re.match("suites/(selftest|engine)/", name)
            ):
                yield name.replace("suites/", "lockstep_suites/", 1)


def build(source: Path, kind: str, into: Path) -> Path:
    """Build a wheel or an sdist with the backend that pyproject.toml names."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of each file of a wheel, by its path."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what is ignored: setuptools also reads what it wrote before."""
    path = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
        copy(CHECKOUT / name, path / name)
    return path


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    """A new package is to be added to the list in pyproject.toml."""
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert sorted(found) == sorted(sources())


def test_the_wheel_says_what_it_is_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (CHECKOUT / "LICENSE").read_bytes()
        points = archive.read(f"{info}/entry_points.txt").decode().split()
    assert points == ["[pytest11]", "lockstep", "=", "lockstep.pytest_plugin"]
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (CHECKOUT / "README.md").read_text()
    needed = [each for each in metadata.get_all("Requires-Dist", []) if 'extra == "suites"' in each]
    assert [each.split(";")[0] for each in needed] == ["hypothesis", "torchvision"]


def test_the_sdist_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build(checkout, "sdist", tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert contents(build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel", tmp_path / "again")) == (
        contents(wheel)
    )


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder that has no more than an engine."""

    python: Path
    folder: Path

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run Python so that it does not find what lies in the folder."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(self.python), "-P", *args]
        return subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=300, check=False
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    path = tmp_path_factory.mktemp("installed")
    venv.create(path / "env", symlinks=True)
    (packages,) = (path / "env/lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # of Python alone: to install it is to unpack it
        archive.extractall(packages)
    lines = [f"import site; site.addsitedir({entry!r})" for entry in sys.path if "site-packages" in entry]
    (packages / "rest.pth").write_text("\n".join(lines))
    # A project with another folder of this name, and fixtures that have the names of ours.
    (path / "project/suites").mkdir(parents=True)
    (path / "project/suites/__init__.py").write_text("raise RuntimeError('of the project')")
    names = "def engine(): pass", "def world(): pass"
    fixtures = "".join(f"@pytest.fixture(autouse=True)\n{each}\n" for each in names)
    (path / "project/conftest.py").write_text(f"import pytest\n{fixtures}")
    shutil.copy(SAMPLE, path / "project")
    return Installed(path / "env/bin/python", path / "project")


@pytest.fixture(scope="module")
def conformance(installed: Installed) -> subprocess.CompletedProcess[str]:
    """The command in that folder, with claims of which the engine breaks one."""
    chosen = ("-k", "by_rank and NO_SHARD-flat-fp16-2 or every_bit and NO_SHARD-flat-fp16-2")
    return installed.run(
        *("-m", "harness", "conformance", "--engine", "sample_engine:HandDDP", FILE, *chosen),
    )


def test_the_command_runs_the_installed_suites(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    assert conformance.returncode == pytest.ExitCode.TESTS_FAILED, conformance.stdout + conformance.stderr
    table = load(installed.folder / "conformance-report/conformance.json")
    # By the same names as in a checkout, so that tables can be merged, and deviations are known.
    (engine,) = table.engines
    outcomes = {claim.id: table.cell(claim, engine).outcome for claim in table.claims.values()}
    assert outcomes.pop(f"{FILE}::{BROKEN}") == Outcome.BROKEN
    assert outcomes
    assert all(claim.startswith(f"{FILE}::") for claim in outcomes)


def test_nothing_is_written_beside_the_installed_suites(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    (packages,) = installed.python.parents[1].glob("lib/python*/site-packages")
    written = {path.relative_to(packages).as_posix() for path in (packages / "lockstep_suites").rglob("*")}
    kept = {name for name in written if (packages / name).is_file() and "__pycache__" not in name}
    assert kept == {name for name in sources() if name.startswith("lockstep_suites/")}


def test_the_line_that_runs_a_claim_again_needs_no_path(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    (line,) = {line for line in conformance.stdout.splitlines() if line.startswith("pytest ")}
    words = shlex.split(line)
    assert words[:3] == ["pytest", "--pyargs", f"lockstep_suites.mixed_precision.test_numerics::{BROKEN}"]
    again = installed.run("-m", *words)
    assert (again.returncode, again.stdout.splitlines()[-1].split(" in ")[0].strip(" =")) == (1, "2 failed")
