"""Which engines a run is about, and which of them an item. Used on both sides; must not import torch."""

from __future__ import annotations

import pytest

from harness.conformance.registry import EngineError, built_in_names, check_name

DEFAULT = "lockstep"


def engines_of(config: pytest.Config) -> tuple[str, ...]:
    """Return the engines under test as `--engine` names them, each once, in the order they were given."""
    return tuple(dict.fromkeys(config.getoption("engine") or [DEFAULT]))


def engine_of(item: pytest.Item) -> str | None:
    """Return the name of the engine that the item is run on; None if it does not ask for one."""
    if "engine" not in getattr(item, "fixturenames", ()):
        return None
    engines = engines_of(item.config)
    callspec = getattr(item, "callspec", None)
    name = callspec.params.get("engine") if callspec is not None and len(engines) > 1 else engines[0]
    return name if name in engines else None


def claim_of(item: pytest.Item) -> str:
    """Return the item's node id without the engine: what it is called when there is one engine only."""
    nodeid, engine = str(item.nodeid), engine_of(item)
    if engine is None or len(engines_of(item.config)) == 1:
        return nodeid
    if nodeid.endswith(f"[{engine}]"):
        return nodeid.removesuffix(f"[{engine}]")
    return f"{nodeid.removesuffix(f'-{engine}]')}]"


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Make an item of each engine, where there are several. Their ids come last, see `claim_of`."""
    engines = engines_of(metafunc.config)
    if len(engines) > 1 and "engine" in metafunc.fixturenames:
        metafunc.parametrize("engine", engines, ids=engines, indirect=True)


def check_engines(config: pytest.Config) -> None:
    """Raise pytest.UsageError, before anything is collected, for a name behind which there is no engine."""
    for name in engines_of(config):
        try:
            check_name(name)
        except EngineError as error:
            raise pytest.UsageError(str(error)) from None
    if not set(engines_of(config)) <= set(built_in_names()):
        config.pluginmanager.register(StopsWithoutEngine(), "harness-engines")


class StopsWithoutEngine:
    """Ends the run where the user's own engine cannot be had: every other test would say the same."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session
        self._starts = tuple(str(EngineError(name, "")) for name in engines_of(session.config))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.when == "setup":
            text = report.longreprtext
            found = [text.find(start) for start in self._starts if start in text]
            if found:
                self._session.shouldfail = text[found[0] :].splitlines()[0]
