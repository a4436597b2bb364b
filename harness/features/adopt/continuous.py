"""torch's `MultiProcContinuousTest` and what derives from it: FSDPTestContinuous, DTensorContinuousTestBase.

torch's parent process starts workers with the first `setUp` of a class, sends them the name of each method,
and waits for their answers in place of the method. A worker makes one process group for the whole class, and
for each name an instance of its own. Here each rank does both in turn: nothing is started; what would wait
runs the worker's part. The group is kept from item to item.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from lockstep.features.adopt import torch_internals
from lockstep.features.adopt.kinds import Demand, LeftAlone, NothingToRun, RankOfItem

__tracebackhide__ = True

# Methods of torch's launcher. A class with one of its own does with processes what only it knows.
_LAUNCHER = ("_ensure_processes_spawned", "_spawn_processes", "_worker_loop", "_worker_run_main_wait")
_TORCHS_VARIABLES = ("LOCAL_RANK", "TORCH_NCCL_DESYNC_DEBUG")
"""Variables that `_init_pg` of torch's classes sets: a test that leaves them is not reported."""


class Continuous:
    """The kind of `MultiProcContinuousTest`."""

    family = "torch"

    def matches(self, cls: type) -> bool:
        return torch_internals.is_a(cls, "MultiProcContinuousTest")

    def demand(self, item: pytest.Item) -> Demand:
        cls = item.cls  # type: ignore[attr-defined]
        base = torch_internals.base("MultiProcContinuousTest")
        for name in _LAUNCHER:
            owner = next((parent for parent in cls.__mro__ if name in vars(parent)), None)
            if owner is not None and owner is not base:
                raise LeftAlone(f"{owner.__name__} has a launcher of its own: it overrides {name}")
        if not hasattr(cls, "_ensure_processes_spawned"):
            raise LeftAlone("torch before 2.12 starts its processes as soon as the class is set up")
        if torch_internals.is_a(cls, "C10dTorchCommsTestBase"):
            raise LeftAlone("it needs torchcomms, whose groups are not torch's")
        return Demand(_size_of(cls), torch_internals.timeout_of(item.name))

    def owner_of_groups(self, item: pytest.Item) -> object:
        return item.cls  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def running(self, item: pytest.Item, place: RankOfItem) -> Iterator[None]:
        """Put the worker's part in place of what waits for workers."""
        case: Any = item.instance  # type: ignore[attr-defined]
        waits = item.obj  # type: ignore[attr-defined]

        @functools.wraps(waits)
        def work(*_: object) -> None:
            __tracebackhide__ = True
            Worker(case, place).run()

        item.obj = work  # type: ignore[attr-defined]
        with (
            torch_internals.variables_restored(_TORCHS_VARIABLES),
            mock.patch.object(type(case), "_spawn_processes", classmethod(_start_nothing)),
        ):
            try:
                yield
            finally:
                item.obj = waits  # type: ignore[attr-defined]


def _size_of(cls: Any) -> int:
    """Return how many workers torch would start for a class."""
    sizes: list[int] = []
    with (
        torch_internals.without_log(),
        mock.patch.object(cls, "_spawn_processes", lambda size: sizes.append(int(size))),
        mock.patch.object(cls, "_processes_spawned", False),
        mock.patch.object(cls, "world_size", vars(cls).get("world_size", cls.world_size)),
    ):
        try:
            cls._ensure_processes_spawned()
        except unittest.SkipTest as skip:
            raise NothingToRun(str(skip)) from None
        except Exception as error:
            raise LeftAlone(f"its world_size cannot be read: {type(error).__name__}: {error}") from error
    if sizes[0] < 1:
        raise NothingToRun(f"world_size is {sizes[0]}: torch would start no process, and run nothing")
    return sizes[0]


def _start_nothing(cls: Any, world_size: int) -> None:
    cls.processes, cls.task_queues, cls.completion_queues = [], [], []
    cls.rdvz_file = os.devnull + "/none"  # which `tearDownClass` removes, if it can


class Worker:
    """The part of a worker process, in a rank.

    Args:
        parent: the instance after its `setUp`.
    """

    def __init__(self, parent: Any, place: RankOfItem) -> None:
        self._parent = parent
        self._class = type(parent)
        self._place = place

    def run(self) -> None:
        """Run the method as a worker would, and judge its end as the parent would."""
        __tracebackhide__ = True
        with (
            mock.patch.object(self._class, "rank", self._place.rank),
            mock.patch.object(self._class, "_worker_run_main_wait", _call_method),
        ):
            try:
                if not torch_internals.is_initialized():
                    rendezvous = f"{self._place.directory}/rendezvous"
                    self._class._init_pg(self._place.rank, self._place.size, rendezvous)
                self._class._run_test_given_id(self._parent.id())
            except SystemExit as end:
                self._judge(end)

    def _judge(self, end: SystemExit) -> None:
        __tracebackhide__ = True
        code = 0 if end.code is None else end.code
        if (message := torch_internals.skip_message(code)) is not None:
            self._place.skip_all(message)
        failure = pytest.fail.Exception(f"exited with {code!r} before its end")
        raise failure.with_traceback(end.__traceback__) from None


def _call_method(instance: Any, method: Callable[[], object]) -> types.MethodType:
    """Return the method for an instance of a worker's, as its constructor asks for it."""

    def call(self: Any) -> None:
        __tracebackhide__ = True
        try:
            method()
        finally:
            self.doCleanups()  # in torch's worker the end of the process undoes what they would

    return types.MethodType(functools.wraps(method)(call), instance)
