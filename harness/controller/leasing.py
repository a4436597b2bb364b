"""What a world of this run leases of the machine: ranks where a bound is set, and its GPUs.

Runs in the controller, which imports it only where something is leased; must not import torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial

import pytest

from harness.controller.requests import count_gpus, ranks_at_once
from harness.launch.claim import Claim, Need
from harness.launch.leases import Lease, Leases
from harness.launch.ledger import Ledger, default_directory
from harness.protocol import WorldKey

_told = pytest.StashKey[bool]()


def lease_for(key: WorldKey, config: pytest.Config, make_room: Callable[[], None]) -> Lease:
    """Return a lease for a world; wait for it if need be, after `make_room` has ended all others.

    Raises:
        LaunchError: it could not be had in time, or leases cannot be kept on this machine.
    """
    leases = Leases(Ledger(default_directory()), config.getini("ranks_wait"), partial(_tell, config))
    return leases.take(_need(key, config), make_room)


def _need(key: WorldKey, config: pytest.Config) -> Need:
    at_once = ranks_at_once(config)
    claim = Claim(
        os.getpid(),
        str(config.rootpath),
        ranks=0 if at_once is None else key.size,
        gpus=_visible_gpus() if key.device == "cuda" else (),
        exclusive=key.backend == "nccl",
    )
    return Need(claim, key.size, at_once)


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
        text = f"{os.environ.get('PYTEST_XDIST_WORKER', 'a controller')} had a long time of {text}"
        message = warnings.WarningMessage(text, UserWarning, str(config.inipath or config.rootpath), 1)
        config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": message, "when": "runtest", "nodeid": "", "location": None}
        )
