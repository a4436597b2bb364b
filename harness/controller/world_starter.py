"""Starting of worlds for a controller, in a pytest session like its own.

Runs in the controller; imports torch only where accelerators are requested.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.backends.device import Device
from lockstep.controller.option_checks import output_directory_of
from lockstep.controller.pytest_internals import basetemp_of, modules_to_rewrite
from lockstep.exceptions import LaunchError
from lockstep.launch.limits import explain
from lockstep.launch.processes import Launcher
from lockstep.output import OutputDirectory
from lockstep.specification import PLUGIN, SessionSpec, WorldKey
from lockstep.world.world import World


class WorldStarter:
    """Starts worlds for one controller.

    Args:
        launch: returns the launcher; called when the first world is needed.
    """

    def __init__(self, config: pytest.Config, launch: Callable[[], Launcher]) -> None:
        self._config = config
        self._launch = launch
        self._numbers = itertools.count()
        self._workerinput: dict[str, Any] | None = None
        self._output_directory = output_directory_of(config)
        if self._output_directory:
            worker = getattr(config, "workerinput", {"workerid": "master"})["workerid"]
            OutputDirectory(self._output_directory).clear_logs(worker)

    def start(self, key: WorldKey, make_room: Callable[[], None]) -> World:
        """Return a world that is ready; `make_room` is called before it waits for others, to end all of ours.

        Raises:
            WorldError: its ranks did not start.
            LaunchError: ranks cannot be started on this machine.
        """
        try:
            session, launcher, basetemp = self._session_spec(), self._launch(), basetemp_of(self._config)
        except OSError as error:
            raise LaunchError(explain(error)) from error
        # After all that may fail: it ends with the world.
        share = self._config.hook.pytest_ranks_admit(config=self._config, key=key, make_room=make_room)
        world = World(key, f"world-{next(self._numbers)}", session, launcher, share)
        device = Device(key.device)
        names = () if device.is_cpu or key.spread else device.names()
        try:
            world.start(
                seed=self._config.getoption("world_seed"),
                gpus=names if share is None else share.gpus,
                basetemp=basetemp,
                timeout=self._config.getoption("world_timeout"),
            )
        except BaseException as error:
            world.kill()
            if isinstance(error, OSError):
                raise LaunchError(explain(error)) from error
            raise
        return world

    def _session_spec(self) -> SessionSpec:
        config = self._config
        # Every rank would open the file of --debug again, as soon as it reads its arguments.
        args = [arg for arg in map(str, config.invocation_params.args) if not arg.startswith("--debug")]
        parts: dict[str, Any] = {}
        config.hook.pytest_ranks_session(config=config, args=args, parts=parts)
        environ = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        if self._workerinput is None:  # all worlds have the same
            self._workerinput = xdist_input(config)
        return SessionSpec(
            args=tuple(args),
            cwd=str(config.invocation_params.dir),
            argv=tuple(sys.argv),
            sys_path=tuple(sys.path),
            environ=environ,
            workerinput=self._workerinput,
            captures=config.getoption("capture", "no") in ("fd", "sys"),
            output_directory=self._output_directory,
            rootdir=str(config.rootpath),
            inifile=str(config.inipath or ""),
            renames_plugin=not config.pluginmanager.hasplugin(PLUGIN),
            to_rewrite=modules_to_rewrite(config),
            parts=parts,
        )


def xdist_input(config: pytest.Config) -> dict[str, Any]:
    """Return the `workerinput` of ranks, filled by plugins as for a worker of pytest-xdist.

    Plugins leave to the main process what is done once in a run, and recognise a worker by its `workerinput`.
    Some look in it for what their part in the main process has put there.
    """
    given: dict[str, Any] | None = getattr(config, "workerinput", None)  # this is a worker itself
    if given is not None:
        return given
    made = {"workerid": "master", "workercount": 1, "testrunuid": uuid.uuid4().hex, "mainargv": sys.argv}
    config.hook.pytest_ranks_worker(config=config, worker=made)
    return made
