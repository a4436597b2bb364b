"""Processes of tests that run in the controller: who starts them, and what is counted.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.controller.requests import REQUEST
from lockstep.exceptions import LaunchError
from lockstep.features.spawn.child import Server
from lockstep.features.spawn.multiprocessing_internals import processes_started_by, start_new_interpreter
from lockstep.features.spawn.starter import Started, Starter
from lockstep.launch.multiprocessing_internals import server_pid
from lockstep.launch.processes import ProcessLauncher
from lockstep.process_tree import is_running

_OUTPUT = "harness-spawned"
"""Key under which a worker of pytest-xdist leaves its counts for the main process."""


class SpawnAdoption:
    """Starts the processes of tests from the server, while an item runs.

    Args:
        ready_launcher: returns the launcher when its server is ready, None where ranks start elsewhere.

    Attributes:
        is_mentioned: Whether a collected file may start processes.
    """

    def __init__(self, config: pytest.Config, ready_launcher: Callable[[], ProcessLauncher | None]) -> None:
        self.is_mentioned = False
        self._config = config
        self._ready_launcher = ready_launcher
        self._lock = threading.Lock()
        self._starter: Starter | None = None
        self._server: int | None = None
        self._why_not = ""
        self._counts: Counter[str] = Counter()
        """Processes by the reason why they are new interpreters, "" for those of the server."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if REQUEST in item.stash:  # its ranks start its processes
            return (yield)
        with processes_started_by(self._start):
            return (yield)

    def _start(self, process: BaseProcess, method: str) -> Any:
        with self._lock:
            starter = self._find_starter()
        if starter is not None:
            return starter.start(process, method)
        self._observe(Started(process, self._why_not))
        return start_new_interpreter(process)

    def _find_starter(self) -> Starter | None:
        """Return what starts processes from the server that runs, which is started if there is none."""
        if self._why_not:
            return None
        if self._starter is None or self._server is None or not is_running(self._server):
            self._starter = None
            try:
                launcher = self._ready_launcher()
            except LaunchError as error:
                self._why_not = str(error)
                return None
            if launcher is None or not launcher.forks:
                self._why_not = (
                    "the run is on several hosts" if launcher is None else "ranks_start_method = spawn"
                )
                return None
            self._server = server_pid()
            server = Server(launcher.directory, _environ_of(self._server))
            self._starter = Starter(server, self._observe)
        return self._starter

    def _observe(self, started: Started) -> None:
        self._counts[started.why_not] += 1

    # What is reported at the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workerinput"):  # of pytest-xdist
            self._config.workeroutput[_OUTPUT] = dict(self._counts)  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._counts.update(getattr(node, "workeroutput", {}).get(_OUTPUT, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._config.getoption("ranks_adopt_report") and self._counts:
            terminalreporter.section("adopted processes", sep="-")
            for why, count in sorted(self._counts.items()):
                fate = f"in new interpreters: {why}" if why else "from the server"
                terminalreporter.write_line(f"{count} process{'' if count == 1 else 'es'} {fate}")


def _environ_of(pid: int | None) -> dict[str, str]:
    """Return the environment that a process was started with."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
        return {name: value for name, _, value in pairs}
    return dict(os.environ)
