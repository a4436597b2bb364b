"""How a controller starts its worlds: with a lease where one is needed, in a session like its own.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.controller.posing import workerinput_of
from harness.controller.requests import output_directory_of, ranks_at_once
from harness.exceptions import LaunchError
from harness.launch.limits import explain
from harness.launch.processes import ProcessLauncher
from harness.output_directory import OutputDirectory
from harness.protocol import SessionSpec, WorldKey
from harness.world.world import World

if TYPE_CHECKING:
    from harness.launch.leases import Lease


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
        from harness.controller.leasing import lease_for

        return lease_for(key, self._config, make_room)

    def _session_spec(self) -> SessionSpec:
        config = self._config
        # Every rank would open --debug's file anew, as soon as it reads its arguments.
        args = [arg for arg in map(str, config.invocation_params.args) if not arg.startswith("--debug")]
        if config.pluginmanager.hasplugin("_cov"):
            args.append("--no-cov")  # pytest-cov in a rank would erase what others have measured
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        if self._workerinput is None:  # all worlds have the same: plugins are asked once
            self._workerinput = workerinput_of(config)
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
