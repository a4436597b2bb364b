"""Fixtures of the harness's tests of itself: an environment without surprises, projects, fault sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.features.adopt.plugin import IMPORTS as OF_ADOPTED_TESTS
from suites.selftest.browser import Browser, find_browser, start_browser
from suites.selftest.fault_session import FaultSession, run_faults
from suites.selftest.project import WITHOUT_PLUGINS, Project, Run, copy_project, run_pytest
from suites.selftest.second_tries import pytest_runtest_setup  # noqa: F401
from suites.selftest.warm_interpreter import IMPORTED
from suites.selftest.warm_pytest import run_module

# Variables that would make a session under test behave differently here than elsewhere.
REMOVED = {
    "PYTEST_ADDOPTS",
    "PYTHONDONTWRITEBYTECODE",  # each rank would compile test files for itself
    "PYTHONUNBUFFERED",
    "PYTHONIOENCODING",  # tox sets it: output would be written otherwise than for users
    "TOX_ENV_DIR",  # where pytest then keeps its cache, the same for all projects
    # By one of these Hypothesis sees that it runs in CI: it then draws the same examples every time and
    # keeps none; pytest shows long differences in full.
    *("CI", "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI", "BUILD_NUMBER", "BUILDKITE", "bamboo.buildKey"),
    *("CIRCLECI", "CIRRUS_CI", "CODEBUILD_BUILD_ID", "GITHUB_ACTIONS", "GITLAB_CI", "HEROKU_TEST_RUN_ID"),
    *("TEAMCITY_VERSION", "TF_BUILD"),
}
IMPORTS = {
    "adopt": OF_ADOPTED_TESTS,
    "port": ("libcst", "lockstep.port.command"),
    **dict.fromkeys(
        ("compiles", "conformance", "divergence", "goldens", "layouts", "test_docs_sessions", "test_on_shm"),
        ("torch._dynamo",),
    ),
    **dict.fromkeys(("test_caches", "test_compiler"), ("torch._inductor.compile_fx",)),
    "injection": ("lockstep.features.injection.injector",),
    "test_properties": ("torch._dynamo", "torch.distributed.tensor"),
    "test_blocks": (
        *("functorch.compile", "torch._dynamo.debug_utils", "torch._inductor.codecache"),
        *("torch.export._trace", "torch._inductor.pattern_matcher", "torch._inductor.debug"),
        "torch._inductor.compiler_bisector",
        *("torch.distributed.tensor.experimental._attention", "torch.nn.attention.flex_attention"),
        *("torch.fx.experimental.validator", "lockstep.assertions", "lockstep.engine"),
    ),
}
"""What all sessions of a folder, or of a file, import: it takes longer than to import torch."""


@pytest.fixture(scope="module", autouse=True)
def clean_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give sessions under test the same environment wherever they run, and make them respect Ctrl-C."""
    if "RANK" in os.environ:  # there it would be a change that the first test leaves
        yield
        return
    in_background = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # set by a shell, and inherited
    if in_background:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        for name in REMOVED:
            patch.delenv(name, raising=False)
        imports = (
            name for place in (request.path.parent.name, request.path.stem) for name in IMPORTS.get(place, ())
        )
        patch.setenv(IMPORTED, " ".join(imports))
        yield
    if in_background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def make_project() -> Iterator[Project]:
    # Not under `tmp_path`, which is deep under pytest-xdist: files are looked for where they usually are.
    with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as path:
        project = Project(Path(path))
        yield project
        project.kill()


@pytest.fixture
def project() -> Iterator[Project]:
    with make_project() as project:
        yield project


@pytest.fixture(scope="module")
def shared_project() -> Iterator[Project]:
    """One project for several tests, which look at one session from different sides."""
    with make_project() as project:
        yield project


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Pytester, which runs pytest in forks of a warm interpreter."""

    def run(*command: object, timeout: float) -> pytest.RunResult:
        assert command[:2] == pytester._getpytestargs()
        path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH", ""))))
        arguments, environ = map(str, command[2:]), {**os.environ, "PYTHONPATH": path}
        begun = time.monotonic()
        done = run_module("pytest", *arguments, cwd=Path.cwd(), environ=environ, timeout=timeout)
        lines = done.stdout.splitlines(), done.stderr.splitlines()
        return pytest.RunResult(done.returncode, *lines, time.monotonic() - begun)

    monkeypatch.setattr(pytester, "run", run)
    return pytester


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of the requesting module's PROJECT, with its OPTIONS, variables ENVIRON and lines INI.

    No installed plugin is loaded, unless ENVIRON names it.
    """
    module = request.module
    path = copy_project(module.PROJECT, tmp_path_factory.mktemp(Path(module.PROJECT).name))
    if hasattr(module, "INI"):
        (path / "pytest.ini").write_text(f"[pytest]\n{module.INI}\n")
    environ = WITHOUT_PLUGINS | getattr(module, "ENVIRON", {})
    return run_pytest(path, *getattr(module, "OPTIONS", ()), **environ)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test of a session one for each backend that its module names."""
    if "session" in metafunc.fixturenames and hasattr(metafunc.module, "BACKENDS"):
        metafunc.parametrize("session", metafunc.module.BACKENDS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultSession]:
    """One session over the project FAULTS of the requesting module, with the plugins of its PLUGINS.

    A module with BACKENDS has one session for each, in a new interpreter if it is FRESH. At the end, the test
    that came after each fault must have passed on the same ranks.
    """
    plugins = getattr(request.module, "PLUGINS", ())
    path = tmp_path_factory.mktemp("faults")
    backend = getattr(request, "param", "gloo")
    fresh = getattr(request.module, "FRESH", False)
    session = run_faults(request.module.FAULTS, path, *plugins, backend=backend, fresh=fresh)
    yield session
    session.assert_healthy()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless browser; tests that use it are skipped where there is none."""
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on the PATH, nor named by LOCKSTEP_BROWSER")
    with start_browser(program) as started:
        yield started


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test failed that has passed in a second try: `--reruns` alone says only that it did."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.write_sep("_", f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
