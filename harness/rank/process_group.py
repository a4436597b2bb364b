"""The default process group of a rank: joined, aborted when the rank has failed, joined again."""

from __future__ import annotations

import functools
import importlib
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from lockstep.backends import BACKENDS, meets, objects_of
from lockstep.backends.device import Device
from lockstep.place import interface_of
from lockstep.rank.flight_record import MAX_RECORDED, limit_records
from lockstep.rank.rendezvous import NO_TIMEOUT, Stores
from lockstep.rank.torch_internals import (
    TakenGroups,
    group_members,
    process_groups,
    set_default_store,
    take_groups,
    wrap_destroy_process_group,
)
from lockstep.specification import RankSpec


class EndedGroups:
    """Groups of tests that ended with a failed case: those who made them may destroy them once more.

    Attributes:
        note: words for what fails for want of one that was made before the case; "" if none was.
    """

    def __init__(self) -> None:
        self._groups: WeakSet[dist.ProcessGroup] | None = None
        self._before: WeakSet[dist.ProcessGroup] = WeakSet()
        self.note = ""

    def begin_case(self) -> None:
        """Take the groups that there are for those of others than the case."""
        self._before = WeakSet(_groups_of_tests())

    def end(self, case: str) -> None:
        """Take note of the groups that a failed case is about to end."""
        groups = _groups_of_tests()
        if not groups:
            return
        if not self.note and not self._before.isdisjoint(groups):
            self.note = (
                f"process groups and meshes that were made before case [{case}] ended when it failed: make "
                "those that cases use inside of each case"
            )
        if self._groups is None:
            self._groups = WeakSet()
            wrap_destroy_process_group(self._tolerant)
        self._groups.update(groups)

    def _tolerant(self, destroy: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(destroy)
        def wrapper(group: Any = None) -> None:
            if self._groups is None or group not in self._groups:
                destroy(group)

        return wrapper


def _groups_of_tests() -> list[dist.ProcessGroup]:
    return [group for group in process_groups() if group is not dist.group.WORLD]


class DefaultGroup:
    """The default process group as one rank holds it."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._backends = objects_of(spec.key.backend)
        self._meets = meets(spec.key.backend)
        self._generation = 0
        self._of_rank: TakenGroups | None = None
        local_rank = spec.rank if spec.place is None else spec.place.local_rank
        self.device = Device(spec.key.device).of_rank(local_rank, spec.gpus)
        self.is_aborted = False
        self.ended = EndedGroups()
        self._joined = 0
        self._store: dist.Store | None = None
        self.stores = Stores(spec)
        self._items = 0
        """Number of items since the store was made."""
        self._hidden: TakenGroups | None = None
        self._hidden_at = 0
        self._place = spec.rank, spec.key.size
        self._living: tuple[int, ...] = ()
        """The ranks of a group that was joined without others, by their numbers when the test began."""
        self.joins: list[tuple[int, tuple[int, ...]]] = []
        """The time and the ranks of each default group joined in this item, and of the one before."""
        self._foreign: deque[tuple[int, int]] = deque(maxlen=MAX_RECORDED)
        """From when to when the group was hidden, of which torch's flight recorder still has collectives."""
        self._left: list[dist.ProcessGroup] = []
        """Groups of the worlds that tests have rebuilt."""

    def join(self) -> None:
        """Meet the other ranks.

        In a world without a group only what a test's own group needs is prepared.
        """
        self._prepare()
        self.is_aborted = False
        self._joined = time.time_ns()
        key, (rank, size) = self._spec.key, self._place
        if not key.has_group:
            return
        self.joins.append((self._joined, self._living or tuple(range(size))))
        self._generation += 1
        name = f"store-{self._generation}"
        own = next(filter(None, (backend.store() for backend in self._backends)), None)
        self._store = own or self.stores.make(name, size, is_eager=True)
        self._items = 0
        dist.init_process_group(
            key.backend, store=self._store, rank=rank, world_size=size, timeout=NO_TIMEOUT
        )

    def _prepare(self) -> None:
        rank, size = self._place
        place = self._spec.place if self._meets else None
        local_rank, local_size = (rank, size) if place is None else (place.local_rank, place.local_size)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(local_rank))
        os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(local_size))
        interface = interface_of("127.0.0.1" if place is None or not place.store_port else place.address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if place is not None and place.store_port:
            os.environ.update(GROUP_RANK=str(place.host))
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            self.stores.reach_server(place)
        most = limit_records()
        # As torchrun does: ranks that share a machine's cores must not each take all of them.
        torch.set_num_threads(_threads(os.environ.get("OMP_NUM_THREADS", "")))
        for backend in self._backends:
            backend.prepare()
        # Whatever a test calls `cuda:0` is a GPU of this world.
        Device(self.device.type).use(self.device, self._spec.gpus)
        for backend in self._backends:
            if backend.module:
                importlib.import_module(backend.module)
        for backend in BACKENDS.values():
            backend.limit_record(most)

    def begin_item(self) -> None:
        """Let the groups that a test makes meet under keys of its own, which all ranks count alike.

        When groups of `new_group(..., use_local_synchronization=True)` are gone, torch gives their names to
        the next ones: gloo would find addresses that are no longer served, and wait. In a world without a
        group the test's own is expected, and none of an earlier test counts.
        """
        del self.joins[:-1]
        self.ended.note = ""
        if self._store is not None and dist.is_initialized():
            self._items += 1
            set_default_store(dist.PrefixStore(f"item-{self._items}", self._store))
        if not (self._spec.key.has_group or dist.is_initialized()):
            self.is_aborted = False
            self._joined = time.time_ns()

    def stands(self) -> bool:
        """Return whether the next test can start with this group, or without one if it starts so.

        It cannot once a test has regrouped the ranks that were left: others may be missing.
        """
        return (
            not self.is_aborted
            and not self._living
            and (not self._spec.key.has_group or dist.is_initialized())
        )

    def stand_for(self, rank: int, size: int) -> None:
        """Leave a group that needs no other process for that of another rank or size; 0.3 ms."""
        if self._place != (rank, size):
            self._place = rank, size
            self._destroy()
            self.join()

    def abort(self) -> None:
        """Close this rank's connections, so that ranks that wait for it in a collective fail at once.

        Destroying the group would not suffice: it lives on while a traceback's frames, a model or work in
        flight refer to it, and its destructor waits for that work.
        """
        if not (dist.is_initialized() or self._hidden):
            return
        self.is_aborted = True
        has_group = self._spec.key.has_group
        for backend in self._backends:
            backend.abort(is_of_world=has_group)
        if has_group and not any(backend.connects for backend in self._backends):
            return  # the connections that there are, are the test's
        for backend in BACKENDS.values():
            backend.close_connections()

    def detach(self) -> None:
        """Leave the groups and their connections to the rank, in a forked child of it.

        The child has no use for the groups, as their threads are not copied; it may make its own.
        """
        # Never destroyed: it would shut them down, and remove the file of a store that all ranks are through.
        self._of_rank = take_groups()
        if not self._meets:  # the connections that there are, are the test's
            return
        for backend in BACKENDS.values():
            backend.detach()

    def hide(self) -> None:
        """Make torch forget all groups of this rank, which stay connected, so that a test has its own."""
        self._hidden, self._hidden_at = take_groups(), time.time_ns()

    def show(self) -> TakenGroups:
        """Make torch know the groups again; return those that it has had since."""
        assert self._hidden is not None
        groups = take_groups()
        self._hidden.put_back()
        self._hidden = None
        self._foreign.append((self._hidden_at, time.time_ns()))
        return groups

    def lend(self, store: dist.Store) -> dist.ProcessGroup:
        """Make torch know the hidden default group, over the store of a test; return it."""
        assert self._hidden is not None
        return self._hidden.lend_default(store)

    def has_begun(self, at: int) -> bool:
        """Whether a collective that began then, nanoseconds since the epoch, is of the groups of now."""
        if self._hidden is not None:
            return at >= self._hidden_at
        return at >= self._joined and not any(start <= at < end for start, end in self._foreign)

    def members(self) -> list[tuple[dist.ProcessGroup, tuple[int, ...]]]:
        """Return the ranks of each group of this rank, by the numbers that they had when the test began."""
        if not self._living:
            return group_members()
        return [(group, tuple(self._living[rank] for rank in ranks)) for group, ranks in group_members()]

    def repair(self, case: str = "") -> None:
        """Leave the group and meet the other ranks in a new one. Every rank must call it.

        Args:
            case: what has failed, and with which the groups of tests end, too.
        """
        if case:
            self.ended.end(case)
        self.abort()
        self._destroy()
        self.join()

    def regroup(self, living: tuple[int, ...]) -> None:
        """Leave the group and meet those ranks in a new one that are left, of which this is one.

        The earlier groups stay until the process ends: where a model drops the last reference to one, its
        destructor would wait, in the main thread, for a collective that never ends (see `_destroy`).
        """
        self._left += process_groups()
        self._living = living
        self._place = living.index(self._spec.rank), len(living)
        self.repair()

    def leave(self) -> None:
        """Destroy the group where its backend warns otherwise; connections end with the process."""
        for backend in self._backends:
            backend.leave(self._destroy)

    def _destroy(self) -> None:
        if not dist.is_initialized():
            return
        groups = process_groups()
        dist.destroy_process_group()
        for backend in self._backends:
            backend.release(groups)


def _threads(variable: str) -> int:
    """Return the number in OMP_NUM_THREADS, the first of a list; 1 where there is none."""
    first = variable.partition(",")[0].strip()
    return max(int(first), 1) if first.isdecimal() and len(first) < 6 else 1
