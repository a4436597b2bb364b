"""Installed plugins and conftests that meet a rank: what they find there, and what happens if they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.selftest.project import HEADER, WITHOUT_PLUGINS, Run, copy_project, run_pytest

SWAPS_TERMINAL = """
import pytest

class Reporter:
    pass

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    standard = config.pluginmanager.getplugin("terminalreporter")
    config.pluginmanager.unregister(standard)
    config.pluginmanager.register(standard, "terminalreporter")
"""
TWO = "def test_a(world): pass\ndef test_b(world): assert world.rank == 0\n"
FAILS_LATE = """
import os

def pytest_sessionstart(session):
    if "RANK" in os.environ:
        session.config.workerinput["of_its_other_half"]

class Part:
    def pytest_sessionfinish(self, session):
        if "RANK" in os.environ:
            session.config.of_its_main_process

def pytest_configure(config):
    config.pluginmanager.register(Part())

def pytest_runtest_setup(item):
    if "RANK" in os.environ:
        raise ValueError("it runs where it was left out")
"""

IMPORTED_BEFORE = """
import sys

def test_it(world, pytestconfig):
    loader = sys.modules["pytest_timeout"].__loader__
    assert type(loader).__name__ == "AssertionRewritingHook"
    assert loader.config is not pytestconfig
"""


def install(path: Path, name: str, module: str) -> None:
    """Make an installed distribution with a pytest plugin, in a directory that is to be on the path."""
    metadata = path / f"{name}-1.5.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (metadata / "entry_points.txt").write_text(f"[pytest11]\n{name} = plugin_{name}\n")
    (path / f"plugin_{name}.py").write_text(module)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("failing")
    install(path / "site", "swaps", SWAPS_TERMINAL)
    install(path / "site", "late", FAILS_LATE)
    (path / "pytest.ini").write_text("[pytest]\n")
    (path / "test_it.py").write_text(HEADER + TWO)
    plugins = [part for name in ("swaps", "late") for part in ("-p", name)]
    environ = {"PYTHONPATH": str(path / "site"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return run_pytest(path, "-p", "lockstep.plugin", *plugins, **environ)


def test_plugins_that_fail_in_ranks_are_left_out_there(failing: Run) -> None:
    assert [failing.outcome(name) for name in ("test_a", "test_b")] == ["passed", "failure"]
    assert "INTERNALERROR" not in failing.output


def test_each_is_named_once_with_what_it_raised(failing: Run) -> None:
    named = [line.split("PytestWarning: ")[1] for line in failing.lines if "is left out there" in line]
    assert named == [
        "the plugin swaps 1.5 fails in ranks and is left out there (AssertionError: one of name or plugin "
        "needs to be specified); -p no:swaps leaves it out of the run",
        "the plugin late 1.5 fails in ranks and is left out there (KeyError: 'of_its_other_half'); "
        "-p no:late leaves it out of the run",
    ]


def test_a_conftest_that_fails_is_no_plugin_to_leave_out(tmp_path: Path) -> None:
    copy_project("plain_and_ranks", tmp_path)
    text = "import os\n\ndef pytest_configure():\n    assert 'RANK' not in os.environ, 'not here'\n"
    (tmp_path / "conftest.py").write_text(text)
    done = run_pytest(tmp_path, **WITHOUT_PLUGINS)
    assert "did not start" in done.output
    assert "not here" in done.output
    assert "is left out" not in done.output


WORKERS = """
import os
import pytest

def pytest_configure(config):
    if hasattr(config, "workerinput"):
        number = int(config.workerinput["workerid"].removeprefix("gw"))
        config.workerinput["port"] = 5000 + number

def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["written"] = True

@pytest.fixture(scope="session")
def database():
    return "test_" + os.environ["PYTEST_XDIST_WORKER"]
"""
TESTS = """
def test_worker(world, pytestconfig, database):
    of_worker = pytestconfig.workerinput
    assert (of_worker["port"], of_worker["workercount"]) == (5000 + world.rank, 2)
    assert database == f"test_gw{world.rank}"
"""


def test_a_rank_is_a_worker_with_a_number_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(WORKERS)
    (tmp_path / "test_it.py").write_text(HEADER + TESTS)
    done = run_pytest(tmp_path, "-p", "no:xdist")
    assert done.outcome("test_worker") == "passed", done.output


OWN_OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--backend", default="jax")
    parser.getgroup("ours").addoption("--device", action="store_true")
    parser.addoption("--skew")
"""
READS_OPTIONS = """
def test_options(world, pytestconfig):
    assert (pytestconfig.getoption("backend"), pytestconfig.getoption("device")) == ("triton", True)
    assert world.backend == "gloo"
"""


def test_a_project_keeps_its_own_options(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(OWN_OPTIONS)
    (tmp_path / "test_it.py").write_text(HEADER + READS_OPTIONS)
    options = ("--backend", "triton", "--device", "--skew", "left", "--ranks-backend", "shm")
    done = run_pytest(tmp_path, *options)
    assert "AssertionError: assert 'shm' == 'gloo'" in done.output
    words = "--ranks-backend shm --backend triton --device --skew left"
    assert f"pytest test_it.py::test_options {words}" in done.lines


def test_the_server_imports_plugins_for_ranks(tmp_path: Path) -> None:
    """With their asserts rewritten, as a rank would import them itself."""
    (tmp_path / "test_it.py").write_text(HEADER + IMPORTED_BEFORE)
    run = run_pytest(tmp_path, "-W", "error", fresh=True)
    assert run.count() == "1 passed", run.output


@pytest.mark.parametrize("blocked", ["assertion", "xdist", "logging"])
def test_a_plugin_of_the_run_may_be_blocked(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "test_it.py").write_text(f"{HEADER}def test_it(world): assert world.size == 2\n")
    run = run_pytest(tmp_path, "-p", f"no:{blocked}")
    assert run.count() == "1 passed", run.output


def test_a_plugin_that_is_blocked_may_be_named_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(f"{HEADER}def test_it(world): assert world.size == 2\n")
    run = run_pytest(tmp_path, "-p", "no:cacheprovider", "-p", "cacheprovider", "--lf")
    assert run.count().startswith("1 passed"), run.output


HAS_A_PROXY = """
import pytest

class Proxy:
    @property
    def __class__(self):
        raise ZeroDivisionError("there is no object yet")

proxy = Proxy()

class Part:
    @pytest.fixture
    def of_an_object(self):
        return "of an object"

def pytest_configure(config):
    config.pluginmanager.register(Part())

@pytest.fixture
def of_a_module():
    return "of a module"
"""


def test_fixtures_of_plugins_are_found(tmp_path: Path) -> None:
    """And nothing else is asked what it is."""
    (tmp_path / "own.py").write_text(HAS_A_PROXY)
    test = "def test_it(of_an_object, of_a_module):\n    assert of_an_object != of_a_module\n"
    (tmp_path / "test_it.py").write_text(HEADER + test)
    run = run_pytest(tmp_path, "-p", "own")
    assert run.count() == "1 passed", run.output
