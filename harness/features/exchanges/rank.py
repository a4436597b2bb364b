"""Sends and receives that a test has begun. Runs inside a rank.

The flight recorder has those of nccl, and of gloo collectives alone (seen in torch 2.13); the record of shm
has them without the line that called them.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.features.exchanges.plugin import ANY_RANK, FEATURE, Exchanged, Exchanging
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.hookspecs import Ending
from lockstep.tracebacks import is_installed

__tracebackhide__ = True  # a send that fails is the user's, and torch's


Channel = tuple[weakref.ref[dist.ProcessGroup], bool, int, int]
"""A group; whether it is sends or receives; the peer's rank in the group; the tag."""
_Begun = tuple[Channel, Exchanged]
"""A send or a receive as it was begun, `begun` is its number in the channel."""


class Exchanges:
    """Counts the sends and receives of this process, and those that were waited for.

    A message whose handle is dropped before its `wait` is lost on gloo, and what the other rank sends or
    receives next does not match: the world cannot be used again.

    Args:
        base: directory that the user's files are named from.
        members: returns the ranks of each group.
        manager: of the rank's session.

    Attributes:
        has_failed: whether a wait has raised in this test.
    """

    def __init__(
        self,
        base: str,
        members: Callable[[], list[tuple[dist.ProcessGroup, tuple[int, ...]]]],
        manager: pytest.PytestPluginManager,
    ) -> None:
        self._base, self._members, self._manager = base, members, manager
        self._exchanged: dict[Channel, Exchanged] = {}
        """The peer of each is its rank in the group."""
        self._works: weakref.WeakKeyDictionary[dist.Work, _Begun] = weakref.WeakKeyDictionary()
        self._awaited: tuple[_Begun, timedelta | None] | None = None
        self._changing = threading.Lock()
        self._sees_shm = self._sees_waits = self.has_failed = False

    def install(self) -> None:
        """See all sends and receives from now on, by whatever name the user has imported the function."""
        group: Any = dist.ProcessGroup
        group.send = self._recorded(group.send, is_send=True)
        group.recv = self._recorded(group.recv, is_send=False)
        group.recv_anysource = self._recorded(group.recv_anysource, is_send=False)
        self._see_shm()
        backends: Any = dist.Backend
        register = backends.register_backend

        @functools.wraps(register)
        def registered(*args: Any, **kwargs: Any) -> None:
            register(*args, **kwargs)
            self._see_shm()  # a test may be the first to import it

        backends.register_backend = registered

    def pytest_ranks_regrouped(self) -> None:
        self.clear()

    def _see_shm(self) -> None:
        """See those of shm too, which has methods of its own, once it is imported."""
        shm = sys.modules.get("lockstep.shm")
        if shm is None or self._sees_shm:
            return
        self._sees_shm = True
        group: Any = shm.ShmProcessGroup  # its third method calls the second
        group.send = self._recorded(group.send, is_send=True)
        group.recv = self._recorded(group.recv, is_send=False)
        if self._sees_waits:
            shm.ShmWork.wait = self._waiting(shm.ShmWork.wait)

    def clear(self) -> None:
        """Forget everything: a test begins, or the groups are new."""
        with self._changing:
            self._exchanged.clear()
            self._works.clear()
            self.has_failed = False

    def take(self) -> tuple[Exchanged, ...]:
        """Return what the groups that still live have exchanged, and forget it."""
        if not self._exchanged:
            return ()
        with self._changing:
            for work, (channel, _) in list(self._works.items()):
                if work.is_completed():
                    self._count_wait(channel)
            exchanged = list(self._exchanged.items())
        found = self._in_living_groups(exchanged)
        self.clear()
        return found

    def current(self) -> Exchanging | None:
        """Return what this rank has exchanged so far in the test, and what it waits for, if anything."""
        if not self._exchanged:
            return None
        with self._changing:
            exchanged, awaited = list(self._exchanged.items()), self._awaited
        if awaited is None:
            return Exchanging(self._in_living_groups(exchanged), None, 0.0)
        (channel, begun), given = awaited
        timeout = given or _timeout_of(channel[0]())
        of_living = self._in_living_groups([(channel, begun)])
        seconds = timeout.total_seconds() if timeout else math.inf
        return Exchanging(self._in_living_groups(exchanged), next(iter(of_living), None), seconds)

    def _in_living_groups(self, exchanged: Sequence[tuple[Channel, Exchanged]]) -> tuple[Exchanged, ...]:
        """Return what was exchanged in groups that still live, with the ranks of peers in the world."""
        members = dict(self._members())
        living = [
            (each, members[group])
            for (of_group, *_), each in exchanged
            if (group := of_group()) is not None and group in members
        ]
        return tuple(
            each if each.peer == ANY_RANK else replace(each, peer=ranks[each.peer]) for each, ranks in living
        )

    def _recorded(self, begin: Callable[..., dist.Work], is_send: bool) -> Callable[..., dist.Work]:
        @functools.wraps(begin)
        def recorded(group: dist.ProcessGroup, tensors: list[torch.Tensor], *peer_and_tag: int) -> dist.Work:
            __tracebackhide__ = True
            work = begin(group, tensors, *peer_and_tag)
            *given, tag = peer_and_tag
            peer = given[0] if given else ANY_RANK
            self._record(work, tensors[0], (weakref.ref(group), is_send, peer, tag), group)
            return work

        return recorded

    def _record(
        self, work: dist.Work, tensor: torch.Tensor, channel: Channel, group: dist.ProcessGroup
    ) -> None:
        name = DEFAULT_GROUP if group is dist.group.WORLD else group.group_name
        call, line = self._caller()
        sent = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        with self._changing:
            before = self._exchanged.get(channel)
            begun, waited = (before.begun, before.waited) if before else (0, 0)
            latest = Exchanged(name, *channel[1:], begun + 1, waited, call, sent, line)
            self._exchanged[channel] = latest
            self._see_waits()
            if tensor.device.type == "cpu":
                self._works[work] = channel, latest
            else:  # nccl sends what it has begun, with or without its handle
                self._count_wait(channel)

    def _count_wait(self, channel: Channel) -> None:
        before = self._exchanged[channel]
        self._exchanged[channel] = replace(before, waited=before.waited + 1)

    def _caller(self) -> tuple[str, str]:
        """Return the function of torch that the user has called, and the user's line."""
        call, frame = "", sys._getframe(3)
        while frame.f_back is not None and is_installed(frame.f_code.co_filename):
            name = frame.f_code.co_name
            call = name if name != "wrapper" else call  # torch wraps some of them
            frame = frame.f_back
        return call, f"{frame.f_code.co_filename.removeprefix(f'{self._base}/')}:{frame.f_lineno}"

    def _see_waits(self) -> None:
        """See waits and ends of tests from the first send or receive on; those of others cost nothing."""
        if not self._sees_waits:
            self._sees_waits = True
            self._manager.register(ExchangesOfTest(self))
            kinds: list[Any] = [dist.Work]
            if self._sees_shm:
                kinds.append(sys.modules["lockstep.shm"].ShmWork)
            for work in kinds:
                work.wait = self._waiting(work.wait)

    def _waiting(self, wait_for: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(wait_for)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:  # by this name the report says where
            __tracebackhide__ = True
            if not (begun := self._works.get(work)):
                return wait_for(work, *args, **kwargs)
            is_main = threading.current_thread() is threading.main_thread()
            if is_main:
                self._awaited = begun, next(iter([*args, *kwargs.values()]), None)
            try:
                return wait_for(work, *args, **kwargs)
            except BaseException:
                self.has_failed = True
                raise
            finally:
                if is_main:
                    self._awaited = None
                with self._changing:
                    if self._works.pop(work, None):
                        self._count_wait(begun[0])

        return wait


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the time after which sends and receives of a group fail, None if it has no such option."""
    if group is None:
        return None
    backend: Any = group._get_backend(torch.device("cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)


class ExchangesOfTest:
    """A plugin of sessions in which a test has exchanged anything."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def pytest_ranks_finished(self, ending: Ending) -> None:
        """Send what the test has exchanged; where handles were dropped, the world cannot be used again.

        Nor where a wait has failed, of which the test knows: its message may still come.
        """
        has_failed = self._exchanges.has_failed
        if exchanged := self._exchanges.take():
            ending.parts[FEATURE] = exchanged
            is_over = not has_failed and all(each.waited == each.begun for each in exchanged)
            ending.usable = ending.usable and is_over
