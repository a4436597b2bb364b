"""Leases of a machine's ranks and GPUs, among all controllers of one user: a line, and who is first in it.

A world takes all it needs at once, or waits in line without holding anything; so nobody waits for somebody
who waits. First come, first served, among those that want the same things.
Runs in the controller; standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from harness.exceptions import LaunchError
from harness.launch.lease_store import LEASE, TURN, LeaseStore, Requirement, StoredLease

TURN_LASTS = 2.0
"""Seconds a world is kept warm though others wait: a new one costs thirty times a test, and more on GPUs."""
RECALL_AFTER = 0.5
"""Seconds without a test after which whoever waits may ask for a warm world's lease."""
LOOK_EVERY = 0.03
"""Seconds between looks of a controller that waits."""
SAY_AFTER = 5.0
"""Seconds of waiting after which the user is told, and then once a minute."""


class Lease:
    """What one world holds of the machine, as its controller sees it.

    The controller keeps the lease alive until the ranks of the world do. It ends with the last of them, so
    a GPU whose memory a dying rank still fills is not lent again, and a controller that is killed, or is
    stuck elsewhere, blocks nobody.
    """

    def __init__(self, store: LeaseStore, need: Requirement, name: str, keeper: int) -> None:
        self.name = name
        self.need = need
        self._claim = need.request
        self._store = store
        self._keeper: int | None = keeper
        self._turn_ends = 0.0

    @property
    def path(self) -> str:
        """The path of its entry in the ledger, without suffix."""
        return f"{self._store.directory}/{self.name}"

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs that the world has; empty for one on CPUs."""
        return self._claim.gpus

    def grant(self, gpus: tuple[str, ...]) -> None:
        """Let the turn in line be a lease, of these GPUs. Only for who is alone with the ledger."""
        assert self._keeper is not None
        self._claim = replace(self.need.request, gpus=gpus)
        self._store.write(self._keeper, self._claim)
        self._store.grant(self.name)

    def leave_to_ranks(self) -> None:
        """Let go of it: all ranks stand ready, and hold it themselves."""
        self._turn_ends = time.monotonic() + TURN_LASTS
        self._let_go()

    def rest(self) -> bool:
        """Note that no test uses the world now; False if its turn is over, and others wait for it."""
        if time.monotonic() >= self._turn_ends and any(map(self._claim.competes, self._store.waiting())):
            return False
        return self._store.put_down(self.name)

    def resume(self) -> bool:
        """Use the world for a test again; False if its ranks were asked to end while it was idle."""
        return self._store.take_up(self.name)

    def end(self) -> None:
        """Take it out of the ledger; if a rank takes its time to die, leave that to whoever reads it next."""
        self._let_go()
        self._store.strike_if_dead(self.name)

    def _let_go(self) -> None:
        if self._keeper is not None:
            os.close(self._keeper)
            self._keeper = None


class Leases:
    """Takes leases for one controller.

    Args:
        ledger: of all controllers that share the machine.
        patience: seconds that a world waits for its lease.
        tell: called with a sentence where that takes long.
    """

    def __init__(self, store: LeaseStore, patience: float, tell: Callable[[str], None]) -> None:
        self._store = store
        self._patience = patience
        self._tell = tell

    def take(self, need: Requirement, make_room: Callable[[], None]) -> Lease:
        """Return a lease; wait for it if need be, after `make_room` has ended all worlds of this controller.

        Raises:
            LaunchError: it could not be had in time; the message names who holds what is missing.
        """
        try:
            return self._take(need, make_room)
        except OSError as error:  # somebody has removed it, or its disk is full
            raise LaunchError(f"cannot keep leases in {self._store.directory}: {error}") from error

    def _take(self, need: Requirement, make_room: Callable[[], None]) -> Lease:
        begun = time.monotonic()
        with self._store.locked():
            lease = Lease(self._store, need, *self._store.add(need.request))
        try:
            if self._in_the_way_of(lease) is not None:
                make_room()
                self._wait(lease, begun)
        except BaseException:
            lease.end()
            raise
        return lease

    def _wait(self, lease: Lease, begun: float) -> None:
        say_at = begun + SAY_AFTER
        while (in_the_way := self._in_the_way_of(lease)) is not None:
            now = time.monotonic()
            text = f"for {lease.need}, {_describe(in_the_way)}"
            if now > begun + self._patience:
                raise LaunchError(
                    f"waited {now - begun:.0f} s {text}. End these runs, or have patience: the ini option "
                    "ranks_wait says for how many seconds"
                )
            if now > say_at:
                self._tell(f"waiting {text}")
                say_at = now + 60.0
            time.sleep(LOOK_EVERY)

    def _in_the_way_of(self, lease: Lease) -> list[StoredLease] | None:
        """Grant the lease (None) if its turn has come and nothing is missing; else return what it awaits."""
        request = lease.need.request
        with self._store.locked():
            entries = self._store.read()
            ahead = [
                e for e in entries if e.kind == TURN and e.name < lease.name and request.competes(e.request)
            ]
            held = [e for e in entries if e.kind == LEASE]
            gpus = None if ahead else lease.need.choose(e.request for e in held)
            if gpus is not None:
                lease.grant(gpus)
                return None
            if not ahead:
                self._recall(lease.need, held)
            return [e for e in held if request.competes(e.request)] + ahead

    def _recall(self, need: Requirement, held: list[StoredLease]) -> None:
        """Ask for leases of worlds that no test uses, the longest idle first, until there will be enough."""
        left = [entry for entry in held if not entry.recalled]
        latest = time.time() - RECALL_AFTER
        idle = [entry for entry in left if entry.idle_since is not None and entry.idle_since < latest]
        for entry in sorted(idle, key=lambda entry: entry.idle_since or 0.0):
            if need.choose(e.request for e in left) is not None:
                return
            if need.request.competes(entry.request) and self._store.recall(entry.name):
                left.remove(entry)


def _describe(entries: list[StoredLease]) -> str:
    held = [str(entry.request) for entry in entries if entry.kind == LEASE]
    ahead = [str(entry.request) for entry in entries if entry.kind == TURN]
    words = [f"held by {', '.join(held)}"] if held else []
    return "; ".join([*words, *([f"before it in line: {', '.join(ahead)}"] if ahead else [])])
