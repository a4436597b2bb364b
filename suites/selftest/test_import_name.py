"""The import names `lockstep` and `harness`, and projects with a package `harness` of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

import lockstep
from lockstep import _alias
from suites.selftest.project import Run, copy_project, run_pytest
from suites.selftest.warm_pytest import Interpreter, run_module

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


WITHOUT_OTHERS = [f"-pno:{each.name}" for each in entry_points(group="pytest11") if each.name != "lockstep"]
"""Options that leave out the other installed plugins, which take as long to import as all else."""
LAYOUTS = [at_root, in_pythonpath, in_src, beside_deep_tests, without_init, of_a_variable]


@pytest.fixture(scope="module", params=[(), ("-P",)], ids=["python -m pytest", "pytest"])
def interpreter(request: pytest.FixtureRequest) -> Interpreter:
    """An interpreter that has imported pytest, and nothing of ours; the program `pytest` has a safe path."""
    return Interpreter(["pytest"], python=(sys.executable, *request.param))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_project_keeps_its_own_package(
    tmp_path: Path, layout: Callable[[Path], None], interpreter: Interpreter
) -> None:
    layout(tmp_path)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}/elsewhere" if layout is of_a_variable else ""}
    options = ("-p", "no:cacheprovider", *WITHOUT_OTHERS)
    done = interpreter.run_module("pytest", *options, cwd=tmp_path, environ=environ, timeout=180)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


NEEDS_OURS = "import pytest\n\n@pytest.mark.ranks(1)\ndef test_ours(world): assert world.size == 1\n"
EMPTY_INI = "[pytest]\n"


@pytest.mark.parametrize(
    "name", ["lockstep", "lockstep.plugin", "harness.plugin", "lockstep.conformance.plugin"]
)
@pytest.mark.parametrize("autoload", ["", "1"], ids=["installed", "no autoload"])
def test_the_plugin_may_be_named(tmp_path: Path, name: str, autoload: str) -> None:
    write(tmp_path, {"test_ours.py": NEEDS_OURS, "pytest.ini": EMPTY_INI})
    done = run_pytest(tmp_path, "-p", name, PYTEST_DISABLE_PLUGIN_AUTOLOAD=autoload)
    assert done.outcome("test_ours") == "passed", done.output


OWN_MARK = """
import pytest

@pytest.mark.ranks("its own")
def test_is_plain(request):
    assert request.config.pluginmanager.get_plugin("lockstep.plugin") is None
"""


@pytest.mark.parametrize("options", [[], ["-n1"]], ids=["one process", "pytest-xdist"])
def test_the_plugin_is_left_out(tmp_path: Path, options: list[str]) -> None:
    write(tmp_path, {"test_it.py": OWN_MARK})
    done = run_pytest(tmp_path, "-p", "no:lockstep", *options)
    assert done.outcome("test_is_plain") == "passed", done.output


def test_options_of_a_project_are_its_own(tmp_path: Path) -> None:
    at_root(tmp_path)
    conftest = "def pytest_addoption(parser):\n    parser.addoption('--backend', default='its own')\n"
    test = "def test_option(pytestconfig): assert pytestconfig.getoption('backend') == 'its own'\n"
    write(tmp_path, {"conftest.py": conftest})
    write(tmp_path / "tests", {"test_option.py": test})
    assert "2 passed" in run_pytest(tmp_path).lines[-1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of tests on ranks in such a project."""
    path = tmp_path_factory.mktemp("both")
    at_root(path)
    copy_project("other_harness", path / "tests")
    write(path, {"pytest.ini": EMPTY_INI})
    return run_pytest(path)


@pytest.mark.parametrize("name", ["test_theirs", "test_both_are_imported", "test_engine", "test_shm"])
def test_both_packages_serve_one_project(both: Run, name: str) -> None:
    assert both.outcome(name) == "passed"


def test_reports_and_warnings_reach_the_controller(both: Run) -> None:
    assert "rank 1 of 2 failed" in both.lines
    assert "pytest tests/test_both.py::test_fails" in both.lines
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
import pickle
import {first}.protocol, {first}.backends.backend
import {second}, {second}.protocol, {second}.backends, {second}.conformance as there
import {first}.conformance as here
from {second} import PeerFailed, RunSubtests
print({first}.protocol is {second}.protocol, {first}.backends is {second}.backends, here is there)
print({first} is {second}, {first}.PeerFailed is PeerFailed, {first}.protocol.__name__)
print(pickle.loads(pickle.dumps({second}.protocol.Close())) == {first}.protocol.Close())
"""
    assert python(code, tmp_path) == ["True True True", "True True lockstep.protocol", "True"]


@pytest.mark.parametrize("name", ["harness", "lockstep"])
def test_a_module_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    code = f"""
import harness, lockstep
try:
    import {name}.nothing
except ModuleNotFoundError as error:
    print(error)
try:
    {name}.nothing
except AttributeError as error:
    print('no attribute' in str(error))
"""
    assert python(code, tmp_path) == ["No module named 'lockstep.nothing'", "True"]


@pytest.mark.parametrize(
    "files", [PACKAGE, {"plugin.py": "THEIRS = 'theirs'\n"}], ids=["package", "namespace"]
)
@pytest.mark.parametrize("change", ["insert(0, PLACE)", "append(PLACE)"], ids=["before", "after"])
def test_a_package_is_found_wherever_it_is_on_the_path(
    tmp_path: Path, change: str, files: dict[str, str]
) -> None:
    """An editable install in `src` comes after `site-packages`, where ours lies."""
    write(tmp_path / "elsewhere/harness", files)
    change = change.replace("PLACE", repr(str(tmp_path / "elsewhere")))
    code = f"""
import sys
sys.path.{change}
import lockstep.protocol, harness.plugin, lockstep.backends
print(harness.plugin.THEIRS, lockstep.backends.__name__)
"""
    assert python(code, tmp_path) == ["theirs lockstep.backends"]


def test_a_module_is_found_after_ours(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"harness.py": PACKAGE["__init__.py"]})
    code = (
        f"import sys; sys.path.append({str(tmp_path / 'elsewhere')!r}); import harness; print(harness.THEIRS)"
    )
    assert python(code, tmp_path) == ["theirs"]


@pytest.mark.parametrize("name", ["harness", "lockstep"])
def test_the_commands_run_by_both_names(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-m", name, "port", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m lockstep port")


def test_engines_are_refused_where_the_plugin_is_blocked(tmp_path: Path) -> None:
    done = run_module("pytest", "-p", "lockstep.conformance.plugin", "-p", "no:lockstep", cwd=tmp_path)
    assert "`-p no:lockstep` blocks the plugin that runs them: remove it" in done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


def test_a_checkout_tests_engines_beside_another_package(tmp_path: Path) -> None:
    at_root(tmp_path)
    words = ("conformance", "--engine=lockstep", "--backend=shm", "suites/pure_fp16", "-k", "no_offload")
    done = run_module("lockstep", *words, cwd=tmp_path)
    assert "1 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert (tmp_path / "conformance-report/conformance.json").exists()


def test_files_that_were_overwritten_do_not_matter(tmp_path: Path) -> None:
    """Another distribution has installed its `harness` into the same `site-packages`."""
    site, package = tmp_path / "site", Path(lockstep.__file__).parent
    shutil.copytree(package, site / "lockstep", symlinks=False)
    write(site / "harness", PACKAGE)
    code = "import harness, lockstep.backends; print(harness.THEIRS, lockstep.backends.__file__)"
    assert python(code, tmp_path, str(site)) == [f"theirs {site}/lockstep/backends/__init__.py"]


def test_another_package_is_asked_of_each_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    theirs = SimpleNamespace(find_spec=lambda name, path: asked.append((name, path)))
    ours = Path(lockstep.__file__).parents[1]
    monkeypatch.setattr(sys, "path", [str(ours), "/elsewhere"])
    monkeypatch.setattr(sys, "meta_path", [theirs, PathFinder])
    monkeypatch.setattr(PathFinder, "find_spec", lambda name, path: asked.append((name, path)))
    assert _alias._other_package() is None
    assert asked == [("harness", None), ("harness", ["/elsewhere"])]
