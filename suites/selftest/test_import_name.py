"""The import name: projects with a package `harness` of their own, and `lockstep`, our other name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep.names
from suites.selftest.project import Run, copy_project, run_pytest

PACKAGE = {"__init__.py": "THEIRS = 'theirs'\n", "plugin.py": "from harness import THEIRS\n"}
TEST = "import harness.plugin\ndef test_theirs(): assert harness.plugin.THEIRS == 'theirs'\n"
MODULE_TEST = "import harness\ndef test_theirs(): assert harness.THEIRS == 'theirs'\n"


def write(path: Path, files: dict[str, str]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name).write_text(text)


def at_root(path: Path) -> None:
    write(path / "harness", PACKAGE)
    write(path / "tests", {"test_it.py": TEST})
    write(path, {"conftest.py": ""})


def in_pythonpath(path: Path) -> None:
    write(path / "lib/harness", PACKAGE)
    write(path / "tests", {"test_it.py": TEST})
    write(path, {"pytest.ini": "[pytest]\npythonpath = lib\n"})


def in_src(path: Path) -> None:
    write(path / "src/harness", PACKAGE)
    write(path / "tests", {"test_it.py": TEST})
    write(path, {"conftest.py": "import sys\nsys.path.insert(0, 'src')\n"})


def beside_deep_tests(path: Path) -> None:
    write(path / "tests/unit", {"test_it.py": MODULE_TEST, "harness.py": PACKAGE["__init__.py"]})


def without_init(path: Path) -> None:
    write(path / "harness", {"plugin.py": PACKAGE["__init__.py"]})
    write(path, {"test_it.py": TEST})


def of_a_variable(path: Path) -> None:
    write(path / "elsewhere/harness", PACKAGE)
    write(path / "tests", {"test_it.py": TEST})


LAYOUTS = [at_root, in_pythonpath, in_src, beside_deep_tests, without_init, of_a_variable]


@pytest.mark.parametrize("module", [True, False], ids=["python -m pytest", "pytest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_project_keeps_its_own_package(
    tmp_path: Path, layout: Callable[[Path], None], module: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/elsewhere" if layout is of_a_variable else "")
    arguments = ["-m", "pytest"] if module else ["-c", "import pytest; pytest.console_main()"]
    environ = {**os.environ, "PYTHONSAFEPATH": ""} if module else {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, *arguments, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    (header,) = [line for line in done.stdout.splitlines() if line.startswith("lockstep: ")]
    assert header.startswith("lockstep: not loaded, as `harness` is another package here (")
    assert str(tmp_path) in header
    assert header.endswith("addopts = -p lockstep, and import it as `lockstep`")


@pytest.mark.parametrize("value", ["text", "lib"])
def test_values_of_other_options_are_not_taken_for_places(tmp_path: Path, value: str) -> None:
    """Where the plugin looks, options of conftests and of other plugins are not known yet."""
    beside_deep_tests(tmp_path)
    write(tmp_path / "lib", {"code.py": ""})
    write(tmp_path, {"conftest.py": "def pytest_addoption(parser): parser.addoption('--theirs')\n"})
    done = run_pytest(tmp_path, "--theirs", value)
    assert done.outcome("test_theirs") == "passed", done.output


def test_patterns_of_testpaths_are_places(tmp_path: Path) -> None:
    beside_deep_tests(tmp_path)
    write(tmp_path, {"pytest.ini": "[pytest]\ntestpaths = t*s\n"})
    assert "1 passed" in run_pytest(tmp_path).lines[-1]


NEEDS_OURS = "import pytest\n\n@pytest.mark.ranks(1)\ndef test_ours(world): assert world.size == 1\n"


@pytest.mark.parametrize("folder", ["third_party/tool", "skipped/deep", "venv"])
def test_a_harness_that_no_test_can_import_is_passed_by(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "harness", PACKAGE)
    if folder != "third_party/tool":
        write(tmp_path / folder, {"test_it.py": MODULE_TEST, "pyvenv.cfg" if folder == "venv" else "x": ""})
    write(tmp_path, {"test_ours.py": NEEDS_OURS, "pytest.ini": NOT_BELOW})
    done = run_pytest(tmp_path)
    assert done.outcome("test_ours") == "passed", done.output
    assert "lockstep: " not in done.output


NOT_BELOW = "[pytest]\nnorecursedirs = skipped/deep venv\nranks_preload =\n"


def test_the_plugin_can_be_asked_for_by_its_usual_name(tmp_path: Path) -> None:
    """Where a `harness` lies that the tests do not import."""
    write(tmp_path / "src/harness", PACKAGE)
    write(tmp_path, {"test_ours.py": NEEDS_OURS, "pytest.ini": NOT_BELOW})
    done = run_pytest(tmp_path, "-p", "harness.plugin")
    assert done.outcome("test_ours") == "passed", done.output


OWN_MARK = """
import pytest

@pytest.mark.ranks("its own")
def test_is_plain(request):
    assert request.config.pluginmanager.get_plugin("harness.plugin") is None
"""


@pytest.mark.parametrize("options", [[], ["-n1"]], ids=["one process", "pytest-xdist"])
def test_the_plugin_is_left_out(tmp_path: Path, options: list[str]) -> None:
    write(tmp_path, {"test_it.py": OWN_MARK})
    done = run_pytest(tmp_path, "-p", "no:lockstep", *options)
    assert done.outcome("test_is_plain") == "passed", done.output


def test_its_options_and_marks_are_its_own(tmp_path: Path) -> None:
    at_root(tmp_path)
    conftest = "def pytest_addoption(parser):\n    parser.addoption('--backend', default='its own')\n"
    test = "def test_option(pytestconfig): assert pytestconfig.getoption('backend') == 'its own'\n"
    write(tmp_path, {"conftest.py": conftest, "pytest.ini": "[pytest]\nmarkers = ranks: its own\n"})
    write(tmp_path / "tests", {"test_option.py": test})
    done = run_pytest(tmp_path, "--strict-markers", "--markers")
    assert "@pytest.mark.ranks: its own" in done.output
    assert "@pytest.mark.ranks(*sizes" not in done.output
    assert "2 passed" in run_pytest(tmp_path).lines[-1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with `-p lockstep` in such a project."""
    path = tmp_path_factory.mktemp("both")
    at_root(path)
    copy_project("other_harness", path / "tests")
    write(path, {"pytest.ini": "[pytest]\naddopts = -p lockstep\nranks_preload =\n"})
    return run_pytest(path)


@pytest.mark.parametrize("name", ["test_theirs", "test_both_are_imported", "test_engine", "test_shm"])
def test_both_packages_serve_one_project(both: Run, name: str) -> None:
    assert both.outcome(name) == "passed"


def test_reports_and_warnings_reach_a_controller_of_that_name(both: Run) -> None:
    assert "rank 1 of 2 failed" in both.lines
    assert "pytest tests/test_both.py::test_fails -p lockstep" in "\n".join(both.lines)
    (warned,) = [line for line in both.lines if "environ: LEFT_BEHIND" in line]
    assert "test_both.py" in warned
    assert " RankStateWarning: " in warned


def python(code: str, cwd: Path, path: str = "") -> list[str]:
    """Return the lines that a program prints."""
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("names", [("harness", "lockstep"), ("lockstep", "harness")])
def test_both_names_lead_to_the_same_modules(tmp_path: Path, names: tuple[str, str]) -> None:
    first, second = names
    code = f"""
import pickle, sys
import {first}.protocol, {first}.shm.errors
import {second}, {second}.protocol, {second}.shm, {second}.conformance as there
import {first}.conformance as here
from {second} import PeerFailed, RunSubtests
print({first}.protocol is {second}.protocol, {first}.shm is {second}.shm, here is there)
print({first}.PeerFailed is PeerFailed, {first}.protocol.__name__)
print(pickle.loads(pickle.dumps({second}.protocol.Close())) == {first}.protocol.Close())
"""
    assert python(code, tmp_path) == ["True True True", f"True {first}.protocol", "True"]


@pytest.mark.parametrize("name", ["harness", "lockstep"])
def test_a_module_that_is_missing_is_named_as_it_was_asked_for(tmp_path: Path, name: str) -> None:
    code = f"""
import harness, lockstep
try:
    import {name}.nothing
except ModuleNotFoundError as error:
    print(error, error.name)
try:
    {name}.nothing
except AttributeError as error:
    print('no attribute' in str(error))
"""
    assert python(code, tmp_path) == [f"No module named '{name}.nothing' {name}.nothing", "True"]


def test_a_package_that_comes_later_on_the_path_is_found(tmp_path: Path) -> None:
    """An editable install in `src` comes after `site-packages`, where ours lies."""
    write(tmp_path / "elsewhere/harness", PACKAGE)
    code = f"""
import sys
sys.path.append({str(tmp_path / "elsewhere")!r})
import harness.plugin, lockstep.shm
print(harness.plugin.THEIRS, lockstep.shm.__name__)
"""
    assert python(code, tmp_path) == ["theirs lockstep.shm"]


def test_the_name_of_a_loaded_lockstep_stays_free(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere/harness", PACKAGE)
    code = f"""
import sys, lockstep.protocol
sys.path.insert(0, {str(tmp_path / "elsewhere")!r})
import harness.plugin
print(harness.plugin.THEIRS)
"""
    assert python(code, tmp_path) == ["theirs"]


def test_the_commands_run_by_both_names(tmp_path: Path) -> None:
    at_root(tmp_path)
    command = [sys.executable, "-m", "lockstep", "port", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m lockstep port")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["harness", "conformance", "--engine", "lockstep"], "`harness` is another package here (PLACE)"),
        (["pytest", "-p", "harness.conformance.plugin"], "`harness` is another package here (PLACE)"),
        (["pytest", "-p", "harness.conformance.plugin", "-p", "no:lockstep"], "an option `-p no:` says"),
    ],
)
def test_engines_are_refused_where_the_plugin_is_not_loaded(
    tmp_path: Path, command: list[str], why: str
) -> None:
    """Under `python -P` the package of the project is not on the path when the command is imported."""
    at_root(tmp_path)
    command = [sys.executable, "-P", "-m", *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    said = done.stderr.splitlines()
    reason = why.replace("PLACE", str(tmp_path / "harness/__init__.py"))
    assert said[0].startswith(f"ERROR: lockstep: not loaded, as {reason}")
    assert said[1].endswith(
        "another package: python -m lockstep conformance, or pytest -p lockstep.conformance.plugin"
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_a_checkout_tests_engines_beside_another_package(tmp_path: Path) -> None:
    at_root(tmp_path)
    words = [
        "conformance",
        "--engine",
        "lockstep",
        "--backend",
        "shm",
        "suites/pure_fp16",
        "-k",
        "no_offload",
    ]
    command = [sys.executable, "-m", "lockstep", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "1 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert (tmp_path / "conformance-report/conformance.json").exists()


def test_files_that_were_overwritten_are_named(tmp_path: Path) -> None:
    """Another distribution has installed its `harness` into the same `site-packages`."""
    copy, source = tmp_path / "site", Path(lockstep.names.__file__).parents[1]
    for name in ("lockstep", "harness"):
        shutil.copytree(source / name, copy / name)
    write(copy / "harness", PACKAGE)
    code = """
import harness
print(harness.THEIRS)
try:
    import lockstep.shm
except ImportError as error:
    print(error)
"""
    line, error = python(code, tmp_path, str(copy))
    assert line == "theirs"
    assert error == (
        f"{copy / 'harness'} has no longer the files of Lockstep: another distribution has installed its "
        "package `harness` in the same place. Install the two into different environments"
    )
