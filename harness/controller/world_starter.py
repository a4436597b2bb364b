"""Starting of worlds for a controller: with a lease where one is needed, in a pytest session like its own.

Runs in the controller; imports torch only where accelerators are requested.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.backends import takes_devices
from lockstep.backends.device import Device
from lockstep.controller.pytest_internals import basetemp_of
from lockstep.controller.requests import output_directory_of
from lockstep.exceptions import LaunchError
from lockstep.launch.limits import explain
from lockstep.launch.processes import Launcher
from lockstep.output import OutputDirectory
from lockstep.specification import SessionSpec, WorldKey
from lockstep.world.world import World

if TYPE_CHECKING:
    from lockstep.launch.leases import Lease

_waited_key = pytest.StashKey[bool]()


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
        """Return a world that is ready; `make_room` is called before it waits for a lease, to end all others.

        Raises:
            WorldError: its ranks did not start.
            LaunchError: ranks cannot be started on this machine.
        """
        try:
            session, launcher, basetemp = self._session_spec(), self._launch(), basetemp_of(self._config)
        except OSError as error:
            raise LaunchError(explain(error)) from error
        needs_lease = not Device(key.device).is_cpu or self._config.getini("ranks_at_once") is not None
        needs_lease = needs_lease and not key.spread  # of one machine; a run has its hosts for itself
        # After all that may fail: it ends with the world.
        lease = lease_for(key, self._config, make_room) if needs_lease else None
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
            parts=parts,
        )


def lease_for(key: WorldKey, config: pytest.Config, make_room: Callable[[], None]) -> Lease:
    """Return a lease for a world; wait for it if need be, after `make_room` has ended all others.

    Raises:
        LaunchError: it could not be had in time, or leases cannot be kept on this machine.
    """
    from lockstep.launch.lease_store import LeaseStore, Requirement, ResourceRequest, default_directory
    from lockstep.launch.leases import Leases

    at_once, device = config.getini("ranks_at_once"), Device(key.device)
    request = ResourceRequest(
        os.getpid(),
        str(config.rootpath),
        ranks=0 if at_once is None else key.size,
        gpus=() if device.is_cpu else device.names(),
        exclusive=takes_devices(key.backend),
    )
    store = LeaseStore(default_directory())
    leases = Leases(store, config.getini("ranks_wait"), partial(_report_wait, config))
    return leases.take(Requirement(request, key.size, at_once), make_room)


def _report_wait(config: pytest.Config, text: str) -> None:
    """Write a line where the user sees it now.

    The output of a process of `pytest -n` is not shown; its first long wait is reported among the warnings.
    """
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        terminal.ensure_newline()
        terminal.write_line(text)
        terminal.flush()  # a pipe would hold it back, and the user acts on it
    elif not config.stash.get(_waited_key, False):
        config.stash[_waited_key] = True
        text = f"{os.environ.get('PYTEST_XDIST_WORKER', 'a controller')} spent a long time {text}"
        message = warnings.WarningMessage(text, UserWarning, str(config.inipath or config.rootpath), 1)
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": "runtest", "nodeid": "", "location": None}
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
