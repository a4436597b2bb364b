"""Processes of tests that run in the controller: who starts them.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from functools import partial, wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from lockstep.controller.requests import REQUEST
from lockstep.exceptions import LaunchError
from lockstep.features.spawn.child import Server
from lockstep.features.spawn.counts import Counts
from lockstep.features.spawn.multiprocessing_internals import (
    processes_not_replaced,
    processes_started_by,
    server_key,
    start_new_interpreter,
)
from lockstep.features.spawn.process_state import differing_variable
from lockstep.features.spawn.processes import TestProcesses
from lockstep.features.spawn.pytest_internals import rewritten_modules
from lockstep.features.spawn.report import complete_report
from lockstep.features.spawn.starter import Started, Starter
from lockstep.features.spawn.torch_internals import joins_preceded, start_processes_replaced
from lockstep.features.spawn.worlds import Spawn, SpawnOnWorlds
from lockstep.launch.multiprocessing_internals import server_pid
from lockstep.launch.processes import ProcessLauncher
from lockstep.process_tree import is_running


class SpawnAdoption:
    """Runs what tests spawn, while an item runs in the controller.

    Args:
        ready_launcher: returns the launcher when its server is ready, None where ranks start elsewhere.
        worlds: runs calls of `spawn` on warm worlds.
        processes: those that items have started.
        counts: of calls and processes.
    """

    def __init__(
        self,
        config: pytest.Config,
        ready_launcher: Callable[[], ProcessLauncher | None],
        worlds: SpawnOnWorlds,
        processes: TestProcesses,
        counts: Counts,
    ) -> None:
        self._config = config
        self._ready_launcher = ready_launcher
        self._worlds = worlds
        self.processes = processes
        self._lock = threading.Lock()
        self._starter: Starter | None = None
        self._server: int | None = None
        self._why_not = ""
        self._counts = counts

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if REQUEST in item.stash:  # its ranks start its processes
            return (yield)

        def replace(original: Callable[..., Any]) -> Callable[..., Any]:
            controller = os.getpid()

            @wraps(original)
            def start_processes(fn: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
                spawn = Spawn(fn, *args, **kwargs)
                if os.getpid() != controller or not self._spawn(item, spawn):
                    return original(fn, *args, **kwargs)
                return None

            return start_processes

        self.processes.begin(item)
        with (
            processes_started_by(self._start),
            start_processes_replaced(replace),
            joins_preceded(self.processes.await_context),
        ):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        complete_report(item, call, report, self.processes)
        return report

    # Calls of `spawn`

    def _spawn(self, item: pytest.Item, spawn: Spawn) -> bool:
        """Run a call on a warm world if that can be; return whether it was run.

        Raises:
            Exception: what `spawn` raises.
        """
        why_not = self._worlds.why_not(item, spawn)
        starter = None if why_not else self._find_starter()
        error = None
        if starter is not None:
            name = differing_variable(os.environ, starter.server.environ)
            why_not = f"{name} was changed, which is read early" if name else ""
            if not why_not:
                with processes_not_replaced():
                    why_not, error = self._worlds.run(item, spawn, starter.server)
        why_not = why_not or self._why_not
        self._counts.add("not on warm ranks" if why_not else "on warm ranks", why_not)
        if error is not None:
            raise error
        return not why_not

    # Processes

    def _start(self, process: BaseProcess, method: str) -> Any:
        with self._lock:
            starter = self._find_starter()
        if starter is not None:
            return starter.start(process, method)
        self._observe(Started.of(process, self._why_not))
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
                self._why_not = "ranks_start_method = spawn" if launcher else "the run is on several hosts"
                return None
            self._server = server_pid()
            self.processes.directory = launcher.directory
            os.makedirs(f"{launcher.directory}/spawned", mode=0o700, exist_ok=True)
            server = Server(launcher.directory, _environ_of(self._server), server_key())
            rewritten = partial(rewritten_modules, self._config)
            self._starter = Starter(server, self._observe, rewritten, self.processes.await_process)
        return self._starter

    def _observe(self, started: Started) -> None:
        self.processes.add(started)
        self._counts.add("in new interpreters" if started.why_not else "from the server", started.why_not)


def _environ_of(pid: int | None) -> dict[str, str]:
    """Return the environment that a process was started with."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
        return {name: value for name, _, value in pairs}
    return dict(os.environ)
