"""Leases of the worlds of one controller. Must not import torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial

import pytest

from lockstep.backends import takes_devices
from lockstep.backends.device import Device
from lockstep.features.leases.lease_store import LeaseStore, Requirement, ResourceRequest, default_directory
from lockstep.features.leases.leases import Lease, Leases
from lockstep.specification import WorldKey

_waited_key = pytest.StashKey[bool]()


def lease_for(key: WorldKey, config: pytest.Config, make_room: Callable[[], None]) -> Lease:
    """Return a lease for a world; wait for it if need be, after `make_room` has ended all others.

    Raises:
        LaunchError: it could not be had in time, or leases cannot be kept on this machine.
    """
    at_once, device = config.getini("ranks_at_once"), Device(key.device)
    request = ResourceRequest(
        os.getpid(),
        str(config.rootpath),
        ranks=0 if at_once is None else key.size,
        gpus=() if device.is_cpu else device.names(),
        exclusive=takes_devices(key.backend),
    )
    store = LeaseStore(default_directory())
    leases = Leases(store, config.getini("ranks_wait"), partial(_report, config))
    return leases.take(Requirement(request, key.size, at_once), make_room)


def _report(config: pytest.Config, text: str) -> None:
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
