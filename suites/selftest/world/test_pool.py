"""The worlds that a controller keeps, with worlds that are no processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from lockstep.exceptions import WorldError
from lockstep.specification import WorldKey
from lockstep.world import pool as module
from lockstep.world.pool import MOST_WARM, Interrupted, WorldPool


def key_of(size: int) -> WorldKey:
    return WorldKey(size, "gloo", "cpu")


class Share:
    def __init__(self) -> None:
        self.rests = self.resumes = True

    def rest(self) -> bool:
        return self.rests

    def resume(self) -> bool:
        return self.resumes


class World:
    """A world that notes what becomes of it."""

    def __init__(self, key: WorldKey, name: str, calls: list[tuple[Any, ...]], share: Share | None) -> None:
        self.key, self.name, self.share, self._calls = key, name, share, calls
        self.is_at_end = self.lost = self.leaves = False
        self.why = ""
        self.complaints: list[str] = []
        self.within: list[float | None] = []

    def fault(self) -> str:
        return self.why

    def is_lost(self) -> bool:
        return self.lost

    def is_gone(self) -> bool:
        return self.is_at_end

    def interrupt(self) -> dict[int, str]:
        self._calls.append(("interrupt", self.name))
        if self.leaves:
            raise WorldError("a rank has left")
        return {1: "in g", 0: "in f"}

    def send_close(self) -> None:
        self._calls.append(("close", self.name))

    def reap(self, timeout: float | None = None) -> list[str]:
        self._calls.append(("reap", self.name))
        self.within.append(timeout)
        return self.complaints

    def kill(self) -> None:
        self._calls.append(("kill", self.name))


class Pool(WorldPool):
    """A pool whose worlds are named "w1", "w2" and so on."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.shares = False
        self.needs_room = False
        self.count = 0
        super().__init__(self.make, lambda world, text: self.calls.append(("complain", world.name, text)))

    def make(self, key: WorldKey, make_room: Callable[[], None]) -> Any:
        if self.needs_room:
            make_room()
        self.count += 1
        self.calls.append(("start", f"w{self.count}"))
        return World(key, f"w{self.count}", self.calls, Share() if self.shares else None)

    def get(self, size: int = 2, *, fresh: bool = False) -> Any:
        return self.take(key_of(size), fresh=fresh)

    def warm(self, *sizes: int) -> list[Any]:
        """Return new warm worlds of these sizes."""
        made: list[Any] = [self.get(size, fresh=True) for size in sizes]
        for world in made:
            self.give_back(world, keep=True)
        self.calls.clear()
        return made

    def new_calls(self) -> list[tuple[Any, ...]]:
        calls, self.calls[:] = self.calls[:], []
        return calls


@pytest.fixture
def pool() -> Pool:
    return Pool()


# Taking


def test_a_warm_world_is_taken_once(pool: Pool) -> None:
    (world,) = pool.warm(2)
    assert pool.get() is world
    assert pool._taken is world
    assert pool.get() is not world
    assert pool.new_calls() == [("start", "w2")]


def test_a_world_of_another_key_or_a_fresh_one_is_started(pool: Pool) -> None:
    (warm,) = pool.warm(2)
    assert pool.get(3).key == key_of(3)
    taken = pool.get(fresh=True)
    assert taken is not warm
    assert pool._taken is taken
    assert pool.new_calls() == [("start", "w2"), ("start", "w3")]
    assert pool.get() is warm


def test_a_world_at_fault_is_killed_and_replaced(pool: Pool) -> None:
    (world,) = pool.warm(2)
    world.why = "a rank ended"
    pool.get()
    expected = [("complain", "w1", "a rank ended"), ("kill", "w1"), ("start", "w2")]
    assert pool.new_calls() == expected
    (world,) = pool.warm(2)
    world.why, world.lost = "a rank ended", True
    pool.get()
    assert pool.new_calls() == [("kill", "w3"), ("start", "w4")]


def test_a_world_that_was_ended_while_it_was_idle_is_closed(pool: Pool) -> None:
    pool.shares = True
    first, second = pool.warm(2, 3)
    first.share.resumes, first.why = False, "a rank ended"
    first.complaints = ["it broke", "twice"]
    assert pool.get(3) is second
    pool.get()
    calls = [("close", "w1"), ("reap", "w1"), ("complain", "w1", "it broke\ntwice"), ("start", "w3")]
    assert pool.new_calls() == calls
    assert first.within == [None]


def test_ended_worlds_are_reaped_before_the_next_is_taken(pool: Pool) -> None:
    first, second, third = pool.warm(2, 3, 4)
    for world in (first, second, third):
        assert pool.get(world.key.size) is world
        pool.give_back(world, keep=False)
    second.is_at_end = True
    pool.new_calls()
    pool.get(5)
    assert pool.new_calls() == [("reap", "w2"), ("start", "w4")]
    pool.get(2, fresh=True)
    assert pool.new_calls() == [("start", "w5")]
    pool.get(2)
    assert pool.new_calls() == [("reap", "w1"), ("start", "w6")]
    pool.close()
    assert pool.new_calls() == [("reap", "w3")]


# Giving back


def test_a_world_that_is_not_kept_closes(pool: Pool) -> None:
    world = pool.get()
    pool.new_calls()
    pool.give_back(world, keep=False)
    assert pool.new_calls() == [("close", "w1")]
    assert pool._taken is None
    assert pool._warm == {}


def test_a_world_whose_share_does_not_rest_closes(pool: Pool) -> None:
    pool.shares = True
    world = pool.get()
    pool.give_back(world, keep=True)
    assert pool.get() is world
    world.share.rests = False
    pool.give_back(world, keep=True)
    assert pool.new_calls() == [("start", "w1"), ("close", "w1")]


def test_the_world_that_has_been_warm_for_longest_makes_place(pool: Pool) -> None:
    pool.warm(*range(1, MOST_WARM + 1))
    world = pool.get(MOST_WARM + 1)
    pool.new_calls()
    pool.give_back(world, keep=True)
    assert pool.new_calls() == [("close", "w1")]
    assert [*pool._warm] == [key_of(size) for size in range(2, MOST_WARM + 2)]


def test_room_is_made_by_worlds_that_have_a_share(pool: Pool) -> None:
    pool.warm(2)
    pool.shares = True
    pool.warm(3, 4)
    pool.shares = False
    pool.give_back(pool.get(5), keep=False)
    pool.shares = pool.needs_room = True
    pool.new_calls()
    pool.get(6)
    assert pool.new_calls() == [
        *(("close", "w2"), ("close", "w3"), ("reap", "w2"), ("reap", "w3")),
        ("start", "w5"),
    ]
    assert [*pool._warm] == [key_of(2)]


# The end


def test_all_worlds_are_closed_and_then_awaited(pool: Pool) -> None:
    pool.give_back(pool.get(4), keep=False)
    first, _ = pool.warm(2, 3)
    first.complaints = ["it broke"]
    pool.close()
    assert pool.new_calls() == [
        *(("close", "w2"), ("close", "w3"), ("reap", "w1")),
        *(("reap", "w2"), ("complain", "w2", "it broke"), ("reap", "w3")),
    ]
    pool.close()
    pool.kill()
    assert pool.new_calls() == []


def test_a_discarded_world_is_killed(pool: Pool) -> None:
    world = pool.get()
    pool.discard(world)
    assert pool.new_calls() == [("start", "w1"), ("kill", "w1")]
    pool.kill()
    assert pool.new_calls() == []


def test_all_worlds_are_killed_at_once(pool: Pool) -> None:
    pool.give_back(pool.get(4), keep=False)
    pool.warm(2)
    pool.get(3)
    pool.new_calls()
    pool.kill()
    assert pool.new_calls() == [("kill", "w2"), ("kill", "w1"), ("kill", "w3")]
    pool.kill()
    pool.close()
    assert pool.new_calls() == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The moments at which the pool looks at the time."""
    moments = [100.0, 103.0, 104.0, 120.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: moments.pop(0)))
    return moments


def test_an_interrupted_pool_ends_its_worlds_in_one_time(pool: Pool, clock: list[float]) -> None:
    closing = pool.get(4)
    pool.give_back(closing, keep=False)
    (warm,) = pool.warm(2)
    taken = pool.get(3)
    warm.complaints, taken.complaints = ["rank 0 did not end in 1 s"], ["rank 1 failed"]
    pool.new_calls()
    found = pool.interrupt(10.0)
    assert pool.new_calls() == [
        *(("close", "w2"), ("interrupt", "w3")),
        *(("reap", "w1"), ("reap", "w2"), ("reap", "w3")),
    ]
    assert [world.within for world in (closing, warm, taken)] == [[7.0], [6.0], [0.0]]
    assert found == Interrupted("w3", {1: "in g", 0: "in f"}, ["rank 0 did not end in 1 s"])
    pool.close()
    pool.kill()
    assert pool.new_calls() == []


def test_a_pool_interrupted_between_tests_has_all_complaints(pool: Pool, clock: list[float]) -> None:
    (warm,) = pool.warm(2)
    warm.complaints = ["rank 1 failed"]
    assert pool.interrupt(10.0) == Interrupted(None, {}, ["rank 1 failed"])


def test_a_rank_may_leave_as_its_world_is_interrupted(pool: Pool, clock: list[float]) -> None:
    pool.get().leaves = True
    assert pool.interrupt(10.0) == Interrupted("w1", {}, [])


@pytest.mark.parametrize("has_ranks", [True, False])
@pytest.mark.parametrize("complains", [True, False])
def test_what_was_interrupted_is_written_by_rank(has_ranks: bool, complains: bool) -> None:
    reporter = Mock()
    ranks = {1: "in g", 0: "in f"} if has_ranks else {}
    complaints = ["rank 0 did not end\nmore"] if complains else []
    Interrupted("w1", ranks, complaints).write(reporter, "test_a.py::test_a")
    expected = []
    if has_ranks or complains:
        expected.append(call.section("interrupted on ranks", sep="-", yellow=True))
    if has_ranks:
        expected.append(call.line("test_a.py::test_a was running:"))
        expected += [call.line("  rank 0: in f"), call.line("  rank 1: in g")]
    if complains:
        expected.append(call.line("  rank 0 did not end"))
    assert reporter.mock_calls == expected
