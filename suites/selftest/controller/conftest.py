"""A controller without processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller.plugin import Controller
from lockstep.launch.processes import RankProgram
from suites.selftest.controller.stand_ins import Hooks, Server, config_of

INI = {"ranks_preload": ["own"], "ranks_start_method": "spawn"}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def hooks(server: Server) -> Hooks:
    def launch(launcher: Any, program: RankProgram) -> Server:
        server.program, server.forks = program, launcher.forks
        return server

    return Hooks(
        pytest_ranks_mentioned=[],
        pytest_ranks_needs_server=[],
        pytest_ranks_launcher=launch,
        pytest_ranks_run_and_log=False,
    )


@pytest.fixture
def controller(tmp_path: Path, hooks: Hooks, server: Server) -> Iterator[Any]:
    config = config_of(tmp_path, {**INI}, hooks, collectonly=False)  # type: ignore[dict-item]
    config.rootpath = tmp_path
    config._tmp_path_factory = SimpleNamespace(getbasetemp=lambda: tmp_path / "base")
    made: Any = Controller(config)
    made._termination = SimpleNamespace(
        handle=lambda: server.signals.append("handle"), restore=lambda: server.signals.append("restore")
    )
    yield made
    made._stop_server()
