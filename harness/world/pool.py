"""The worlds a controller keeps: warm ones between tests, closing ones until they have ended.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lockstep.exceptions import WorldError
from lockstep.specification import WorldKey
from lockstep.world.world import World

MOST_WARM = 4
"""Warm worlds kept at once. A run over more sizes and backends than that starts some again."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The state of the ranks when the run was interrupted."""

    world: str | None
    """Name of the world that ran a test, if one did."""
    ranks: dict[int, str]
    """The status of each of its ranks, in one line."""
    complaints: list[str]
    """Lines on ranks that did not tear down in time, or failed to."""

    def write(self, reporter: pytest.TerminalReporter, nodeid: str) -> None:
        """Write it, with the test's node id, below the failures."""
        if not (self.ranks or self.complaints):
            return
        reporter.section("interrupted on ranks", sep="-", yellow=True)
        if self.ranks:
            reporter.line(f"{nodeid} was running:")
        for rank, doing in sorted(self.ranks.items()):
            reporter.line(f"  rank {rank}: {doing}")
        for complaint in self.complaints:
            reporter.line(f"  {complaint.splitlines()[0]}")


class WorldPool:
    """Warm worlds by key, reused from test to test.

    Args:
        start: makes a world with that key and waits until it is ready; calls `make_room`, its second
            argument, before it waits for its share of the machine.
        complain: called with a world and what went wrong when it ended otherwise than it should.
    """

    def __init__(
        self,
        start: Callable[[WorldKey, Callable[[], None]], World],
        complain: Callable[[World, str], None],
    ) -> None:
        self._start = start
        self._complain = complain
        self._warm: dict[WorldKey, World] = {}
        self._closing: list[World] = []
        self._taken: World | None = None
        """The one that runs a test: a controller runs one at a time."""

    def take(self, key: WorldKey, *, fresh: bool) -> World:
        """Return a world for one test: a warm one if there is one and `fresh` does not forbid it."""
        self._reap([world for world in self._closing if world.is_gone()])
        self._taken = world = None if fresh else self._warm.pop(key, None)
        if world is not None and world.share is not None and not world.share.resume():
            self._close(world)  # it was ended, for a world that waits
            self._taken = world = None
        if world is not None and (fault := world.fault()):
            if not world.is_lost():
                self._complain(world, fault)
            self.discard(world)
            world = None
        if world is None and not fresh:
            # Fixtures of the old world that outlive a test must be torn down before they are set up again.
            self._reap([world for world in self._closing if world.key == key])
        self._taken = world = world or self._start(key, self.make_room)
        return world

    def give_back(self, world: World, *, keep: bool) -> None:
        """Keep a world warm, or make it tear down its session and end; it is not waited for."""
        self._taken = None
        if not keep or (world.share is not None and not world.share.rest()):
            self._close(world)
            return
        self._warm[world.key] = world
        if len(self._warm) > MOST_WARM:
            self._close(self._warm.pop(next(iter(self._warm))))

    def make_room(self) -> None:
        """End the worlds that have a share of the machine, and wait for that: who waits holds nothing."""
        for key in [key for key, world in self._warm.items() if world.share is not None]:
            self._close(self._warm.pop(key))
        self._reap([world for world in self._closing if world.share is not None])

    def discard(self, world: World) -> None:
        """End a world at once that can run nothing more."""
        world.kill()
        self._taken = None

    def close(self) -> None:
        """End all worlds, and wait until they have."""
        for world in self._warm.values():
            self._close(world)
        self._warm = {}
        self._reap(list(self._closing))

    def interrupt(self, within: float) -> Interrupted:
        """Interrupt what runs, give all worlds `within` seconds to tear down; return what was interrupted."""
        until = time.monotonic() + within
        for warm in self._warm.values():
            self._close(warm)
        self._warm = {}
        taken = self._taken
        doing: dict[int, str] = {}
        with contextlib.suppress(WorldError):  # a rank left its session at the same moment
            doing = taken.interrupt() if taken else {}
        complaints = []
        for world in [*self._closing, *([taken] if taken else [])]:
            complaints += world.reap(max(0.0, until - time.monotonic()))
        if taken:  # a tear-down over broken connections is expected to fail
            complaints = [complaint for complaint in complaints if "did not end" in complaint]
        self._closing, self._taken = [], None
        return Interrupted(taken.name if taken else None, doing, complaints)

    def kill(self) -> None:
        """End all worlds at once, without tearing anything down."""
        for world in [*self._warm.values(), *self._closing, *([self._taken] if self._taken else [])]:
            world.kill()
        self._warm, self._closing, self._taken = {}, [], None

    def _close(self, world: World) -> None:
        world.send_close()
        self._closing.append(world)

    def _reap(self, worlds: list[World]) -> None:
        for world in worlds:
            self._closing.remove(world)
            if complaints := world.reap():
                self._complain(world, "\n".join(complaints))
