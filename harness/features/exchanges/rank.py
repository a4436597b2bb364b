"""Sends and receives that a test has begun. Runs inside a rank.

The flight recorder has those of nccl, and of gloo collectives alone (seen in torch 2.13); the record of shm
has them without the line that called them.
"""

from __future__ import annotations

import functools
import math
import signal
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

from lockstep.features.exchanges.plugin import ANY_RANK, FEATURE, Exchanged, Exchanging, begun_by_key
from lockstep.features.leaks.guard import is_service
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.hookspecs import Ending
from lockstep.tracebacks import is_installed

__tracebackhide__ = True  # a send that fails is the user's, and torch's


Channel = tuple[weakref.ref[dist.ProcessGroup], bool, int, int]
"""A group; whether it is sends or receives; the peer's rank in the group; the tag."""
_Begun = tuple[Channel, Exchanged]
"""A send or a receive as it was begun: `begun` is its number in the channel."""
_OF_SHM = "shm-progress"
"""Name of the thread that completes works of shm."""


class Exchanges:
    """Counts the sends and receives of this process, and those that were waited for.

    A message whose handle is dropped before its `wait` is lost on gloo, and what the other rank sends or
    receives next does not match: the world cannot be used again.

    Args:
        base: directory that the user's files are named from.
        members: returns the ranks of each group.
        manager: of the rank's session.
    """

    def __init__(
        self,
        base: str,
        members: Callable[[], list[tuple[dist.ProcessGroup, tuple[int, ...]]]],
        manager: pytest.PytestPluginManager,
    ) -> None:
        self._base, self._members, self._manager = base, members, manager
        self._exchanged: dict[Channel, Exchanged] = {}
        self._works: weakref.WeakKeyDictionary[dist.Work, _Begun] = weakref.WeakKeyDictionary()
        self._awaited: tuple[_Begun, timedelta | None] | None = None
        self._changing = threading.Lock()
        self._sees_shm = self._sees_waits = False

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
        return tuple(found)

    def current(self) -> Exchanging | None:
        """Return what this rank has exchanged so far in the test, and what it waits for, if anything."""
        if not self._exchanged:
            return None
        with self._changing:
            exchanged, awaited = list(self._exchanged.items()), self._awaited
        begun = begun_by_key(self._in_living_groups(exchanged))
        if awaited is None or _may_be_helped():
            return Exchanging(begun, None, 0.0)
        (channel, each), given = awaited
        return Exchanging(begun, each, _seconds_left(given or _timeout_of(channel[0]())))

    def _in_living_groups(self, exchanged: Sequence[_Begun]) -> list[Exchanged]:
        living = {group for group, _ in self._members()}
        return [each for (of_group, *_), each in exchanged if of_group() in living]

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
            if before is None:
                _, is_send, peer, tag = channel
                if peer != ANY_RANK and (ranks := dict(self._members()).get(group)):
                    peer = ranks[peer]
                before = Exchanged(name, is_send, peer, tag, 0, 0, 0, "", "", "")
            latest = replace(before, begun=before.begun + 1, call=call, tensor=sent, line=line)
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
                self._awaited = begun, args[0] if args else kwargs.get("timeout")
            try:
                done = wait_for(work, *args, **kwargs)
            except BaseException:
                with self._changing:
                    if before := self._exchanged.get(begun[0]):
                        self._exchanged[begun[0]] = replace(before, failed=before.failed + 1)
                raise
            finally:
                if is_main:
                    self._awaited = None
            with self._changing:
                if self._works.pop(work, None):
                    self._count_wait(begun[0])
            return done

        return wait


def _timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the time after which sends and receives of a group fail, None if it has no such option."""
    if group is None:
        return None
    backend: Any = group._get_backend(torch.device("cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def _may_be_helped() -> bool:
    """Whether a thread besides the main one and this, which answers, may send or end what that waits for."""
    apart = threading.main_thread(), threading.current_thread()
    others = [each for each in threading.enumerate() if each not in apart and each.name != _OF_SHM]
    return not all(is_service(each) for each in others)


def _seconds_left(timeout: timedelta | None) -> float:
    """Return after how many seconds a wait ends by itself, if need be by a handler of the test's alarm."""
    seconds = timeout.total_seconds() if timeout else math.inf
    alarm, _ = signal.getitimer(signal.ITIMER_REAL)
    return min(seconds, alarm) if alarm and callable(signal.getsignal(signal.SIGALRM)) else seconds


class ExchangesOfTest:
    """A plugin of sessions in which a test has exchanged anything."""

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def pytest_ranks_finished(self, ending: Ending) -> None:
        """Send what the test has exchanged.

        Where handles were dropped, or a wait has failed, the world cannot be used again.
        """
        if exchanged := self._exchanges.take():
            ending.parts[FEATURE] = exchanged
            are_over = all(each.waited == each.begun and not each.failed for each in exchanged)
            ending.usable = ending.usable and are_over
