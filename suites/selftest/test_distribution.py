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
import textwrap
import venv
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from email import message_from_string
from pathlib import Path

import pytest

import lockstep
from lockstep.conformance.stored import load
from lockstep.conformance.table import Outcome
from suites.selftest.warm_pytest import Interpreter

CHECKOUT = Path(lockstep.__file__).parents[1]
SAMPLE = Path(__file__).parent / "conformance" / "sample_engine.py"
SHIPPED = ("harness", "lockstep", "lockstep_suites", "suites", "pyproject.toml", "README.md", "LICENSE")
FILE = "suites/mixed_precision/test_numerics.py"
BROKEN = "test_low_precision_gradients_are_summed_in_fp32_by_rank[NO_SHARD-flat-fp16-2-ranks]"


def sources() -> Iterator[str]:
    """Yield the files that are to be installed, by their path in the wheel."""
    for folder in ("harness", "lockstep", "lockstep_suites"):
        for path in (CHECKOUT / folder).rglob("*"):
            name = path.relative_to(CHECKOUT).as_posix()
            if (
                path.is_file()
                and (folder != "harness" or path.suffix in (".py", ".typed"))  # what type checkers read
                and "__pycache__" not in name
                and not re.match("lockstep_suites/(selftest|engine)/", name)
            ):
                yield name


def build(source: Path, kind: str, into: Path) -> Path:
    """Build a wheel or an sdist with the backend that pyproject.toml names."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without what is ignored: setuptools also reads what it wrote before."""
    path = tmp_path_factory.mktemp("checkout")
    for name in SHIPPED:
        if (CHECKOUT / name).is_dir() and not (CHECKOUT / name).is_symlink():
            shutil.copytree(CHECKOUT / name, path / name)
        else:
            shutil.copy(CHECKOUT / name, path / name, follow_symlinks=False)
    return path


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds, as a release does: it lacks what the sdist lacks."""
    sdist, path = build(checkout, "sdist", tmp_path_factory.mktemp("sdist")), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # Python 3.11 has filters since 3.11.4.
        archive.extractall(path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return build(path / sdist.name.removesuffix(".tar.gz"), "wheel", path / "built")


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {
            entry.filename: entry.CRC for entry in archive.infolist() if ".dist-info/" not in entry.filename
        }
    assert found == {name: zlib.crc32((CHECKOUT / name).read_bytes()) for name in sources()}


def test_the_wheel_says_what_it_is_and_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        assert archive.read(f"{info}/licenses/LICENSE") == (CHECKOUT / "LICENSE").read_bytes()
        points = archive.read(f"{info}/entry_points.txt").decode().split()
    assert points == ["[pytest11]", "lockstep", "=", "lockstep.entry"]
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (CHECKOUT / "README.md").read_text()
    needed = [each for each in metadata.get_all("Requires-Dist", []) if 'extra == "suites"' in each]
    assert [each.split(";")[0] for each in needed] == ["hypothesis", "torchvision"]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and a folder that has no more than an engine."""

    packages: Path
    folder: Path
    interpreter: Interpreter
    """Has imported what the wheel depends on, and nothing of the wheel."""

    def run(self, module: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a module so that it does not find what lies in the folder."""
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return self.interpreter.run_module(module, *args, cwd=self.folder, environ=environ, timeout=300)


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
    imported = ("pytest", "torch._dynamo", "torch.distributed.tensor")
    interpreter = Interpreter(imported, python=(str(path / "env/bin/python"), "-P"))
    return Installed(packages, path / "project", interpreter)


@pytest.fixture(scope="module")
def conformance(installed: Installed) -> subprocess.CompletedProcess[str]:
    """The command in that folder, with claims of which the engine breaks one, with two parameters."""
    chosen = ("-k", "by_rank and NO_SHARD and fp16-2 or every_bit and NO_SHARD-flat-fp16-2")
    return installed.run(
        *("lockstep", "conformance", "--engine", "sample_engine:HandDDP", FILE, *chosen),
    )


def test_the_command_runs_the_installed_suites(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    assert conformance.returncode == pytest.ExitCode.TESTS_FAILED, conformance.stdout + conformance.stderr
    table = load(installed.folder / "conformance-report/conformance.json")
    # By the same names as in a checkout, so that tables can be merged, and deviations are known.
    (engine,) = table.engines
    outcomes = {claim.id: table.cell(claim, engine).outcome for claim in table.claims.values()}
    broken = [claim for claim, outcome in outcomes.items() if outcome == Outcome.BROKEN]
    assert broken == [f"{FILE}::{BROKEN}", f"{FILE}::{BROKEN.replace('flat', 'orig')}"]
    assert len(outcomes) > 2
    assert all(claim.startswith(f"{FILE}::") for claim in outcomes)


def test_nothing_is_written_beside_the_installed_suites(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    packages = installed.packages
    written = {path.relative_to(packages).as_posix() for path in (packages / "lockstep_suites").rglob("*")}
    kept = {name for name in written if (packages / name).is_file() and "__pycache__" not in name}
    assert kept == {name for name in sources() if name.startswith("lockstep_suites/")}


def test_the_line_that_runs_a_claim_again_needs_no_path(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    lines = {line for line in conformance.stdout.splitlines() if line.startswith("pytest ")}
    (words,) = [shlex.split(line) for line in lines if "flat" in line]
    assert words[:3] == ["pytest", "--pyargs", f"lockstep_suites.mixed_precision.test_numerics::{BROKEN}"]
    again = installed.run(*words)
    assert (again.returncode, again.stdout.splitlines()[-1].split(" in ")[0].strip(" =")) == (1, "2 failed")


def collected(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the parameters of the tests that a run with `--collect-only -q` has found."""
    return re.findall(r"^\S*::(.*)$", done.stdout, re.MULTILINE)


def test_the_lines_that_run_all_of_a_cause_need_no_path(
    installed: Installed, conformance: subprocess.CompletedProcess[str]
) -> None:
    name, engine = BROKEN.partition("[")[0], "--engine sample_engine:HandDDP"
    case = "--subtest offload=False,'precision=Precision()'"
    (of_pytest,) = re.findall("all of them: (pytest .*?)(?: \\(and .*)?\n", conformance.stdout)
    page = (installed.folder / "conformance-report/conformance.md").read_text()
    (of_page,) = re.findall(r"^ +(python -m lockstep conformance .*)$", page, re.MULTILINE)
    module = FILE.removeprefix("suites/").removesuffix(".py").replace("/", ".")
    chosen = ["--pyargs", f"lockstep_suites.{module}::{name}"]
    options = ["-p", "lockstep.conformance.plugin", *shlex.split(engine)]
    assert shlex.split(of_pytest) == ["pytest", *chosen, *shlex.split(case), *options]
    assert shlex.split(of_page)[3:] == ["conformance", *shlex.split(f"{engine} {FILE}::{name} {case}")]
    for line in (of_pytest, of_page.removeprefix("python -m ")):
        only = ("--collect-only", "-q", "-k", "NO_SHARD and fp16-2")
        found = collected(installed.run(*shlex.split(line), *only))
        assert found == [BROKEN, BROKEN.replace("flat", "orig")]


def test_all_suites_can_be_named_as_in_a_checkout(installed: Installed, tmp_path: Path) -> None:
    words = ("conformance", "suites", "--collect-only", "-q", "-k", "pure_fp16")
    others = "--ignore-glob=/*/lockstep_suites/[!p]*/*"  # which take seconds to import
    done = replace(installed, folder=tmp_path).run("lockstep", *words, others)
    assert len(collected(done)) > 2, done.stdout


def test_the_plugin_of_engines_may_be_named_by_either_name(installed: Installed, tmp_path: Path) -> None:
    for package in ("harness", "lockstep"):
        words = ("--pyargs", "lockstep_suites.pure_fp16", "-p", f"{package}.conformance.plugin")
        done = replace(installed, folder=tmp_path).run("pytest", *words, "--collect-only", "-q")
        assert len(collected(done)) > 2, done.stderr


def test_suites_run_beside_another_package_harness(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/__init__.py").write_text("THEIRS = 1")
    (tmp_path / "test_theirs.py").write_text("from harness import THEIRS\ndef test_theirs(): assert THEIRS")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .")
    suite = ("--pyargs", "test_theirs.py", "lockstep_suites.pure_fp16", "-k", "theirs or fp16_dtypes")
    done = replace(installed, folder=tmp_path).run("pytest", "-p", "lockstep", *suite)
    assert re.search(r" [2-9] passed", done.stdout.splitlines()[-1]), done.stdout


def test_a_module_is_loaded_once_whatever_name_it_is_imported_by(
    installed: Installed, tmp_path: Path
) -> None:
    """pytest rewrites the modules of an installed plugin, and in a rank asks its finder before ours."""
    test = """
    from lockstep.assertions.closeness import Tolerance as one
    from harness.assertions.closeness import Tolerance as other

    @pytest.mark.ranks(2)
    def test_once(world):
        assert one is other
    """
    (tmp_path / "test_once.py").write_text("import pytest\n" + textwrap.dedent(test))
    done = replace(installed, folder=tmp_path).run("pytest", "-q")
    assert done.stdout.splitlines()[-1].startswith("1 passed"), done.stdout
