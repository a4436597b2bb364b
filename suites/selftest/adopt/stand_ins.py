"""Stand-ins for the base classes of torch's tests, their items and the place of an item in a rank."""

from __future__ import annotations

import sys
import unittest
from types import SimpleNamespace
from typing import Any

from lockstep.features.adopt import torch_internals
from lockstep.features.adopt.kinds import RankOfItem


def function() -> None: ...


def own_launcher(self: object) -> None: ...


def place(**fields: Any) -> RankOfItem:
    def skip(reason: str) -> Any:
        raise unittest.SkipTest(reason)

    given: dict[str, Any] = {
        "rank": 1,
        "size": 2,
        "device": "cpu",
        "directory": "/shared",
        "end_groups": lambda: None,
        "fail_peers": lambda: None,
        "skip_all": skip,
        "any_rank": lambda value: value,
    }
    return RankOfItem(**given | fields)


def item_of(cls: type, name: str = "test_a", **fields: Any) -> Any:
    return SimpleNamespace(cls=cls, name=name, **fields)


class Process:
    """torch's `MultiProcessTestCase`."""

    world_size: Any = 2
    skip_return_code_checks: tuple[object, ...] = ()
    special_return_code_checks: tuple[object, ...] = ()

    def __init__(self, method: str = "test_a") -> None:
        self.method = method

    def test_a(self) -> None: ...
    def _spawn_processes(self) -> None: ...
    def _start_processes(self, proc: object) -> None: ...
    def _join_processes(self, fn: object) -> None: ...
    def _check_return_codes(self, fn: object) -> None: ...
    def join_or_run(self, fn: object) -> None: ...


class Workers:
    """torch's `MultiProcContinuousTest`."""

    world_size: Any = 3
    _processes_spawned = True
    rank: Any = None
    skips: str = ""

    @classmethod
    def _ensure_processes_spawned(cls) -> None:
        if cls.skips:
            raise unittest.SkipTest(cls.skips)
        if not cls._processes_spawned:
            cls.world_size = int(cls.world_size)
            sys.modules[torch_internals.COMMON].logger.info("spawns")
            cls._spawn_processes(cls.world_size)

    @classmethod
    def _spawn_processes(cls, world_size: int) -> None:
        raise AssertionError("a process is started")

    @classmethod
    def _worker_loop(cls) -> None: ...
    def _worker_run_main_wait(self, method: Any) -> Any: ...
    def id(self) -> str:
        return "module.Workers.test_a"


class OfTorchcomms(Workers):
    pass
