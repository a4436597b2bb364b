"""The pytest plugin of engines under test: `--engine`, `--conformance`, the fixture `engine`, deviations.

Not loaded unless a project names it in `pytest_plugins` of its root conftest, or a command line
`-p lockstep.conformance.plugin`. Loaded in the controller and in every rank; must not import torch.

PYTEST_DONT_REWRITE: where the server of ranks has imported it, pytest comes too late to rewrite its asserts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.conformance.deviations import Deviation, known_deviations
from lockstep.conformance.registry import (
    DEFAULT,
    FIXTURE,
    INSTALLED_SUITES,
    EngineError,
    built_in_modules,
    built_in_names,
    check_name,
    claim_of,
    engine_of,
    engines_of,
    find,
)
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.conformance.interface import Engine

pytest_plugins = ["lockstep.plugin"]  # defines the hooks, also where no entry point is loaded


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "engines under test")
    group.addoption(
        "--engine",
        action="append",
        metavar="NAME",
        help="the engine under test, by a known name or as module:attribute; may be given several times "
        f"(default: {DEFAULT})",
    )
    group.addoption(
        "--conformance",
        metavar="DIR",
        help="write to DIR which claims each engine holds, as a page, as Markdown and as JSON",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse, before anything is collected, a name behind which there is no engine.

    Raises:
        pytest.UsageError: Lockstep's own plugin is blocked, the name is not known, or the directory of
            `--conformance` cannot be written.
    """
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    if config.pluginmanager.is_blocked("lockstep"):
        raise pytest.UsageError(
            "engines are tested on ranks, and `-p no:lockstep` blocks the plugin that runs them: remove it"
        )
    here = str(config.invocation_params.dir)
    if here not in sys.path and any(":" in name for name in engines_of(config)):
        sys.path.append(here)  # as `python -m pytest` has it; ranks get the path of this process
    for name in engines_of(config):
        try:
            check_name(name)
        except EngineError as error:
            raise pytest.UsageError(str(error)) from None
    if not set(engines_of(config)) <= set(built_in_names()):
        config.pluginmanager.register(StopsWithoutEngine(), "harness-engines")
    if config.getoption("conformance"):
        from lockstep.conformance.collecting import register

        register(config)


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    """Let the server import the adapters that come with Lockstep: that of ZeRO takes 0.3 s in each rank."""
    hints += built_in_modules(engines_of(config))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Any:
    """Make an item of each engine, where there are several. Their ids come last, see `claim_of`."""
    yield
    engines = engines_of(metafunc.config)
    if len(engines) > 1 and FIXTURE in metafunc.fixturenames:
        metafunc.parametrize(FIXTURE, engines, ids=engines, indirect=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark an item that its engine is known to break as a whole."""
    for deviation in _deviations(item):
        if deviation.cases is None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=deviation.reason, run=deviation.run))


def pytest_ranks_expected_failures(item: pytest.Item) -> Sequence[Deviation]:
    """Return the known deviations that are about single cases of an item."""
    return [deviation for deviation in _deviations(item) if deviation.cases is not None]


def _deviations(item: pytest.Item) -> tuple[Deviation, ...]:
    options = item.config.option
    # The tables are of CPU ranks. With --runxfail nothing is expected to fail.
    if options.runxfail or options.ranks_device not in (None, "cpu") or options.ranks_backend == "nccl":
        return ()
    return known_deviations(engine_of(item), claim_of(item))


def pytest_ranks_rerun(item: pytest.Item) -> list[str] | None:
    """Select the item as in a run of its engine alone."""
    engine = engine_of(item)
    if engine is None:
        return None
    options = [] if engine == DEFAULT else ["--engine", engine]
    if INSTALLED_SUITES not in item.path.parents:
        return [claim_of(item), *options]
    file, _, names = claim_of(item).partition("::")
    module = file.removeprefix("suites").removesuffix(".py").replace("/", ".")
    return ["--pyargs", f"{INSTALLED_SUITES.name}{module}::{names}", *options]


@pytest.fixture(scope="session")
def engine_name(request: pytest.FixtureRequest) -> str:
    """The name of the engine under test, chosen by `--engine`."""
    engines = engines_of(request.config)
    if len(engines) > 1 and not hasattr(request, "param"):
        pytest.fail("there are several engines: name `engine` among the test's arguments", pytrace=False)
    name: str = getattr(request, "param", engines[0])
    return name


@pytest.fixture(scope="session")
def engine(engine_name: str) -> Engine:
    """The engine under test, chosen by `--engine`."""
    try:
        return find(engine_name)
    except EngineError as error:
        if error.__cause__ is not None:  # raised by the user's own code: that traceback is the better message
            raise
        lack = str(error)
    pytest.fail(lack, pytrace=False)


class StopsWithoutEngine:
    """End the run where the user's own engine cannot be had: every other test would fail with the same."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._starts = tuple(str(EngineError(name, "")) for name in engines_of(session.config))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "setup":
            text = report.longreprtext
            found = [text.find(start) for start in self._starts if start in text]
            if found:
                self._session.shouldfail = text[found[0] :].splitlines()[0]
