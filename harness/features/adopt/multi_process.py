"""torch's `MultiProcessTestCase` and what derives from it: FSDPTest, DTensorTestBase, DistributedTestBase.

torch's parent process makes an instance, runs its `setUp`, in which it spawns children, waits for them in
place of the method, and judges their exit codes. A child makes an instance of its own and calls the method.
Here each rank does both in turn: what spawns children notes only that it was called; what waits for them
runs the child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import unittest
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from lockstep.features.adopt import torch_internals
from lockstep.features.adopt.kinds import (
    RANKS_VARIABLES,
    Demand,
    LeftAlone,
    NothingToRun,
    NotOnRanks,
    RankOfItem,
    is_skipped,
)

__tracebackhide__ = True

# Methods of torch's launcher. A class with one of its own does with processes what only it knows.
_LAUNCHER = ("_spawn_processes", "_start_processes", "_join_processes", "_check_return_codes", "join_or_run")

_NOT_USERS = frozenset({"torch", "unittest", "builtins"})
"""Packages of base classes that a test does not change."""


class MultiThreaded:
    """The kind of `MultiThreadedTestCase`, which no rank can run better."""

    family = "torch"

    def matches(self, cls: type) -> bool:
        return torch_internals.is_a(cls, "MultiThreadedTestCase")

    def demand(self, item: pytest.Item) -> Demand:
        raise LeftAlone("its ranks are threads of one process")

    def owner_of_groups(self, item: pytest.Item) -> object:
        raise NotImplementedError

    def running(self, item: pytest.Item, place: RankOfItem) -> AbstractContextManager[None]:
        raise NotImplementedError


class MultiProcess:
    """The kind of `MultiProcessTestCase`."""

    family = "torch"

    def matches(self, cls: type) -> bool:
        return torch_internals.is_a(cls, "MultiProcessTestCase")

    def demand(self, item: pytest.Item) -> Demand:
        cls = item.cls  # type: ignore[attr-defined]
        if is_skipped(cls) or is_skipped(getattr(cls, item.name)):
            raise NotOnRanks
        base = torch_internals.base("MultiProcessTestCase")
        for name in _LAUNCHER:
            owner = next(parent for parent in cls.__mro__ if name in vars(parent))
            if owner is not base:
                raise LeftAlone(f"{owner.__name__} has a launcher of its own: it overrides {name}")
        method = item.name
        try:
            size = int(cls(method).world_size)
        except Exception as error:
            raise LeftAlone(f"its world_size cannot be read: {type(error).__name__}: {error}") from error
        if size < 1:
            raise NothingToRun(f"world_size is {size}: torch would start no process, and run nothing")
        return Demand(size, torch_internals.timeout_of(method))

    def owner_of_groups(self, item: pytest.Item) -> object:
        return item

    @contextlib.contextmanager
    def running(self, item: pytest.Item, place: RankOfItem) -> Iterator[None]:
        """Replace the launcher of the item's instance."""
        case: Any = item.instance  # type: ignore[attr-defined]
        launched: list[object] = []

        def join(function: Any) -> None:
            __tracebackhide__ = True
            if not launched:
                raise unittest.SkipTest("its setUp started no process, so nothing ran")
            for name in launcher:
                delattr(case, name)
            if function in case.special_return_code_checks or function in case.skip_return_code_checks:
                _launch(case, function, place)
            else:
                Child(case, place).run(function)

        launcher = {
            "_spawn_processes": lambda: launched.append("spawn"),
            "_start_processes": launched.append,
            "_join_processes": join,
        }
        vars(case).update(launcher)
        with _as_in_a_child():
            try:
                yield
            finally:
                if file := getattr(case, "file_name", None):  # made by setUp, for its processes
                    with contextlib.suppress(OSError):
                        os.remove(file)


@contextlib.contextmanager
def _as_in_a_child() -> Iterator[None]:
    """Start processes, and see the environment, as torch's children do; restore what its base classes set."""
    method = multiprocessing.get_start_method(allow_none=True)
    with torch_internals.variables_restored((*RANKS_VARIABLES, "TORCH_NCCL_DESYNC_DEBUG")):
        for name in RANKS_VARIABLES:
            os.environ.pop(name, None)
        multiprocessing.set_start_method("spawn", force=True)
        try:
            yield
        finally:
            multiprocessing.set_start_method(method, force=True)


@contextlib.contextmanager
def _attributes_restored(cls: type) -> Iterator[None]:
    """Put back the attributes of a class and of its bases, torch's apart, as a child's end would."""
    classes = [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in _NOT_USERS]
    before = [dict(vars(each)) for each in classes]
    try:
        yield
    finally:
        for each, attributes in zip(classes, before, strict=True):
            now = dict(vars(each))
            for name in now.keys() - attributes.keys():
                delattr(each, name)
            for name in (name for name, value in attributes.items() if now.get(name) is not value):
                setattr(each, name, attributes[name])


def _launch(case: Any, function: Any, place: RankOfItem) -> None:
    """Run a test by torch's own launcher, from one rank: its processes are to exit, or to be killed."""
    __tracebackhide__ = True
    if place.rank == 0:
        case._spawn_processes()
        try:
            case._join_processes(function)
        finally:
            for process in case.processes:
                process.join(1.0)


class Child:
    """The part of a child process, in a rank.

    Args:
        parent: the instance after its `setUp`.
    """

    def __init__(self, parent: Any, place: RankOfItem) -> None:
        self._parent = parent
        self._place = place
        self._method = str(parent._current_test_name())
        self._messages: list[str] = []

    def run(self, function: Any) -> None:
        """Run the method as a child would, and judge the end as the parent would."""
        __tracebackhide__ = True
        expected = "__unittest_expecting_failure__"
        if not getattr(self._parent, expected, getattr(function, expected, False)):
            self._run()
            return
        try:
            self._run()
        except (Exception, pytest.fail.Exception) as error:
            if isinstance(error, unittest.SkipTest):
                raise
            self._place.fail_peers()
            self._place.any_rank(True)
            raise
        if self._place.any_rank(False):
            pytest.fail("another rank failed, as the test expects", pytrace=False)

    def _run(self) -> None:
        __tracebackhide__ = True
        base = torch_internals.base("MultiProcessTestCase")
        assert base is not None
        file = f"{self._place.directory}/rendezvous"
        with (
            _attributes_restored(type(self._parent)),
            mock.patch.object(base, "run_test", self._run_test_of()),
        ):
            try:
                fake_pg = getattr(self._parent, "fake_pg", False)
                type(self._parent)._run(
                    self._place.rank, self._method, file, Pipe(self._messages), fake_pg=fake_pg
                )
            except SystemExit as end:
                self._judge(end)
            except unittest.SkipTest as skip:
                self._place.skip_all(str(skip))

    def _run_test_of(self) -> Any:
        """Return what replaces `run_test`: no thread that listens, and exceptions keep their traceback."""
        place = self._place

        def run_test(child: Any, test_name: str, parent_pipe: object) -> None:
            __tracebackhide__ = True
            torch_internals.seed()
            try:
                getattr(child, test_name)()
            finally:
                child.doCleanups()  # in torch's child the end of the process undoes what they would
            if child.destroy_pg_upon_exit:
                place.end_groups()

        return run_test

    def _judge(self, end: SystemExit) -> None:
        __tracebackhide__ = True
        code = 0 if end.code is None else end.code
        if (message := torch_internals.skip_message(code)) is not None:
            self._place.skip_all(message)
        sent = "\n".join(self._messages)
        pytest.fail(f"exited with {code!r} before its end{sent and ': '}{sent}")


class Pipe:
    """The end of a pipe to the parent: keeps what is sent."""

    closed = False

    def __init__(self, messages: list[str]) -> None:
        self._messages = messages

    def send(self, message: object) -> None:
        self._messages.append(str(message))

    def close(self) -> None:
        """Nothing: there is no other end."""

    def poll(self, timeout: float = 0.0) -> bool:
        return False
