"""How a controller starts its worlds: with a lease where one is needed, in a session like its own.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from harness.controller.requests import count_gpus, output_directory_of, ranks_at_once
from harness.exceptions import LaunchError
from harness.launch.limits import explain
from harness.launch.processes import ProcessLauncher
from harness.output import OutputDirectory
from harness.protocol import SessionSpec, WorldKey
from harness.world.world import World

if TYPE_CHECKING:
    from harness.launch.lease_store import Requirement
    from harness.launch.leases import Lease

_told = pytest.StashKey[bool]()


class WorldStarter:
    """Starts worlds for one controller.

    Args:
        launch: returns the launcher; called when the first world is asked for.
    """

    def __init__(self, config: pytest.Config, launch: Callable[[], ProcessLauncher]) -> None:
        self._config = config
        self._launch = launch
        self._numbers = itertools.count()
        self._at_once = ranks_at_once(config)
        self._workerinput: dict[str, Any] | None = None
        self._output_directory = output_directory_of(config)
        if self._output_directory:
            worker = getattr(config, "workerinput", {"workerid": "master"})["workerid"]
            OutputDirectory(self._output_directory).clear_logs(worker)

    def start(self, key: WorldKey, make_room: Callable[[], None]) -> World:
        """Return a world that stands ready, after `make_room` has ended all others if one waits for a lease.

        Raises:
            WorldError: its ranks did not come up; LaunchError: they cannot on this machine.
        """
        try:
            session, launcher, basetemp = self._session_spec(), self._launch(), basetemp_of(self._config)
        except OSError as error:
            raise LaunchError(explain(error)) from error
        lease = self._lease(key, make_room)  # after all that may fail: it ends with the world
        world = World(key, f"world-{next(self._numbers)}", session, launcher, lease)
        try:
            world.start(
                seed=self._config.getoption("world_seed"),
                basetemp=basetemp,
                timeout=self._config.getoption("world_timeout"),
            )
        except BaseException as error:
            world.kill()
            if isinstance(error, OSError):
                raise LaunchError(explain(error)) from error
            raise
        return world

    def _lease(self, key: WorldKey, make_room: Callable[[], None]) -> Lease | None:
        if self._at_once is None and key.device == "cpu":
            return None
        return lease_for(key, self._config, make_room)

    def _session_spec(self) -> SessionSpec:
        config = self._config
        # Every rank would open --debug's file anew, as soon as it reads its arguments.
        args = [arg for arg in map(str, config.invocation_params.args) if not arg.startswith("--debug")]
        if config.pluginmanager.hasplugin("_cov"):
            args.append("--no-cov")  # pytest-cov in a rank would erase what others have measured
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        if self._workerinput is None:  # all worlds have the same: plugins are asked once
            self._workerinput = xdist_input(config)
        return SessionSpec(
            args=tuple(args),
            cwd=str(config.invocation_params.dir),
            argv=tuple(sys.argv),
            sys_path=tuple(sys.path),
            environ=environ,
            workerinput=self._workerinput,
            measures=measures(config),
            debugged_rank=config.getoption("rank_pdb"),
            captures=config.getoption("capture") in ("fd", "sys"),
            output_directory=self._output_directory,
        )


def measures(config: pytest.Config) -> bool:
    """Whether pytest-cov measures this run."""
    return config.pluginmanager.hasplugin("_cov") and not config.option.no_cov


def basetemp_of(config: pytest.Config) -> Path:
    """Return the directory that this run's `tmp_path`s are in."""
    # The fixture's factory is the only one that knows; pytest-xdist asks it the same way.
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory.getbasetemp()


def lease_for(key: WorldKey, config: pytest.Config, make_room: Callable[[], None]) -> Lease:
    """Return a lease for a world; wait for it if need be, after `make_room` has ended all others.

    Raises:
        LaunchError: it could not be had in time, or leases cannot be kept on this machine.
    """
    from harness.launch.lease_store import LeaseStore, default_directory
    from harness.launch.leases import Leases

    leases = Leases(LeaseStore(default_directory()), config.getini("ranks_wait"), partial(_tell, config))
    return leases.take(_need(key, config), make_room)


def _need(key: WorldKey, config: pytest.Config) -> Requirement:
    from harness.launch.lease_store import Requirement, ResourceRequest

    at_once = ranks_at_once(config)
    claim = ResourceRequest(
        os.getpid(),
        str(config.rootpath),
        ranks=0 if at_once is None else key.size,
        gpus=_visible_gpus() if key.device == "cuda" else (),
        exclusive=key.backend == "nccl",
    )
    return Requirement(claim, key.size, at_once)


def _visible_gpus() -> tuple[str, ...]:
    """Name the GPUs of this run: as CUDA_VISIBLE_DEVICES does where it is set, else by their numbers."""
    number = count_gpus()
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(number)) if variable is None else map(str.strip, variable.split(","))
    return tuple(names)[:number]  # what follows a wrong name counts for nothing, says CUDA


def _tell(config: pytest.Config, text: str) -> None:
    """Write a line where the user sees it now.

    What a process of `pytest -n` writes nobody sees; its first long wait is told among the warnings.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        terminal.ensure_newline()
        terminal.write_line(text)
    elif not config.stash.get(_told, False):
        config.stash[_told] = True
        text = f"{os.environ.get('PYTEST_XDIST_WORKER', 'a controller')} spent a long time {text}"
        message = warnings.WarningMessage(text, UserWarning, str(config.inipath or config.rootpath), 1)
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": "runtest", "nodeid": "", "location": None}
        )


@dataclass(frozen=True)
class _Node:
    """What plugins use of pytest-xdist's handle on a worker."""

    config: pytest.Config
    workerinput: dict[str, Any]
    gateway: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="master"))


def xdist_input(config: pytest.Config) -> dict[str, Any]:
    """Return what ranks take for their `workerinput`, filled by plugins as for a worker of pytest-xdist.

    Raises:
        LaunchError: a plugin's hook for this fails.
    """
    given: dict[str, Any] | None = getattr(config, "workerinput", None)  # this is a worker itself
    if given is not None:
        return given
    told = {"workerid": "master", "workercount": 1, "testrunuid": uuid.uuid4().hex, "mainargv": sys.argv}
    if hasattr(config.option, "randomly_seed"):  # of pytest-randomly, which has it told by pytest-xdist alone
        told["randomly_seed"] = config.option.randomly_seed
    if config.pluginmanager.hasplugin("xdist"):
        try:
            _let_plugins_fill(config, told)
        except Exception as error:
            raise LaunchError(
                "a plugin's hook `pytest_configure_node`, for workers of pytest-xdist and for ranks, failed: "
                f"{type(error).__name__}: {error}. Leave that plugin out with -p no:NAME"
            ) from error
    return told


def _let_plugins_fill(config: pytest.Config, told: dict[str, Any]) -> None:
    manager = config.pluginmanager
    # Ranks are measured in a way of their own, and pytest-cov has no such hook but under pytest -n.
    without = [plugin for plugin in (manager.get_plugin("_cov"),) if plugin is not None]
    manager.subset_hook_caller("pytest_configure_node", without)(node=_Node(config, told))
