"""Leases of a machine's ranks and GPUs, among all controllers of one user: the line of those who wait.

A world takes all it needs at once, or waits in line without holding anything, so there is no deadlock among
worlds. First come, first served, among those that compete for the same resources.
Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from lockstep.backends import takes_devices
from lockstep.backends.device import Device
from lockstep.exceptions import LaunchError
from lockstep.features.leases.lease_store import (
    LEASE,
    TURN,
    LeaseStore,
    Requirement,
    ResourceRequest,
    StoredLease,
    default_directory,
)
from lockstep.specification import WorldKey

TURN_LASTS = 2.0
"""Seconds a world is kept warm though others wait: a new one costs thirty times a test, and more on GPUs."""
RECALL_AFTER = 0.5
"""Seconds without a test after which a world that waits may recall the lease of a warm one."""
LOOK_EVERY = 0.03
"""Seconds between looks of a controller that waits."""
SAY_AFTER = 5.0
"""Seconds of waiting after which the user is informed, and then once a minute."""
_waited_key = pytest.StashKey[bool]()


class Lease:
    """The resources that one world holds of the machine, as its controller sees them.

    The controller keeps the lease alive until the ranks of the world do. It ends with the last of them. So a
    GPU whose memory a dying rank still fills is not lent again, and a controller that is killed, or hangs
    elsewhere, blocks no other.
    """

    def __init__(self, store: LeaseStore, requirement: Requirement, name: str, keeper: int) -> None:
        self.name = name
        self.held = str(store.path(name, LEASE))
        """The file of the lease, which ranks keep locked."""
        self.gpus = requirement.request.gpus
        """Names of the GPUs that the world has; empty for one on CPUs."""
        self.requirement = requirement
        self._request = requirement.request
        self._store = store
        self._keeper = keeper
        self._held = contextlib.ExitStack()
        self._held.callback(os.close, keeper)
        self._turn_ends = 0.0

    def grant(self, gpus: tuple[str, ...]) -> None:
        """Turn the request in line into a lease of these GPUs. Only while the store is locked."""
        self.gpus = gpus
        self._request = replace(self._request, gpus=gpus)
        self._store.write(self._keeper, self._request)
        self._store.grant(self.name)

    def leave_to_ranks(self) -> None:
        """Release it here: all ranks are ready, and hold it themselves."""
        self._turn_ends = time.monotonic() + TURN_LASTS
        self._held.close()

    def rest(self) -> bool:
        """Note that no test uses the world now; return False if its turn is over, and others wait for it."""
        if time.monotonic() >= self._turn_ends and any(map(self._request.competes, self._store.waiting())):
            return False
        return self._store.mark_idle(self.name)

    def resume(self) -> bool:
        """Use the world for a test again; return False if it was recalled while it was idle."""
        return self._store.mark_busy(self.name)

    def end(self) -> None:
        """Remove it from the store; while a rank is still dying, leave that to the next one who reads it."""
        self._held.close()
        self._store.remove_if_dead(self.name)


class Leases:
    """Takes leases for one controller.

    Args:
        store: of all controllers that share the machine.
        patience: seconds that a world waits for its lease.
        report: called with a sentence where that takes long.
    """

    def __init__(self, store: LeaseStore, patience: float, report: Callable[[str], None]) -> None:
        self._store = store
        self._patience = patience
        self._report = report

    def take(self, requirement: Requirement, make_room: Callable[[], None]) -> Lease:
        """Return a lease; wait for it if need be, after `make_room` has ended all worlds of this controller.

        Raises:
            LaunchError: it could not be had in time; the message names who holds what is missing.
        """
        begun = time.monotonic()
        try:
            with self._store.locked():
                lease = Lease(self._store, requirement, *self._store.add(requirement.request))
            try:
                if self._blockers(lease) is not None:
                    make_room()
                    self._wait(lease, begun)
            except BaseException:
                lease.end()
                raise
        except OSError as error:  # the directory was removed, or its disk is full
            raise LaunchError(f"cannot keep leases in {self._store.directory}: {error}") from error
        return lease

    def _wait(self, lease: Lease, begun: float) -> None:
        say_at = begun + SAY_AFTER
        while (blockers := self._blockers(lease)) is not None:
            now = time.monotonic()
            held = ", ".join(str(each.request) for each in blockers if each.kind == LEASE)
            ahead = ", ".join(str(each.request) for each in blockers if each.kind == TURN)
            words = [f"held by {held}"] if held else []
            words += [f"before it in line: {ahead}"] if ahead else []
            text = f"for {lease.requirement}, {'; '.join(words)}"
            if now > begun + self._patience:
                raise LaunchError(
                    f"waited {now - begun:.0f} s {text}. End these runs, or wait longer: the ini option "
                    "ranks_wait has the seconds"
                )
            if now > say_at:
                self._report(f"waiting {text}")
                say_at = now + 60.0
            time.sleep(LOOK_EVERY)

    def _blockers(self, lease: Lease) -> list[StoredLease] | None:
        """Grant the lease and return None if it is first in line and nothing is missing, else its blockers.

        Those are the leases, and the earlier requests in line, that compete with it.
        """
        request = lease.requirement.request
        with self._store.locked():
            stored = self._store.read()
            earlier = [each for each in stored if each.kind == TURN and each.name < lease.name]
            ahead = [each for each in earlier if request.competes(each.request)]
            held = [each for each in stored if each.kind == LEASE]
            gpus = None if ahead else lease.requirement.choose(each.request for each in held)
            if gpus is not None:
                lease.grant(gpus)
                return None
            if not ahead:
                self._recall(lease.requirement, held)
            return [each for each in held if request.competes(each.request)] + ahead

    def _recall(self, requirement: Requirement, held: list[StoredLease]) -> None:
        """Recall leases of worlds that no test uses, the longest idle first, until there will be enough."""
        left = [each for each in held if not each.recalled]
        latest = time.time() - RECALL_AFTER
        idle = [each for each in left if each.idle_since is not None and each.idle_since < latest]
        for each in sorted(idle, key=lambda each: each.idle_since or 0.0):
            if requirement.choose(other.request for other in left) is not None:
                return
            if requirement.request.competes(each.request) and self._store.recall(each.name):
                left.remove(each)


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
