"""Works, bundles of them, and the threads that complete those with a future, of what completes by hand."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from lockstep.shm.collectives import Collectives
from lockstep.shm.work import Bundle, Completed, ProgressThreads, ShmWork, progress


class ByHand:
    """A collective that is done, or fails, when the test says so."""

    def __init__(self) -> None:
        self.is_done = self.is_ready = False
        self.error: BaseException | None = None
        self.timeouts: list[float | None] = []
        self.lingered: list[float] = []
        self.looked = threading.Event()

    def complete(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)
        self.is_done = True
        if self.error is not None:
            raise self.error

    def try_complete(self) -> bool:
        self.is_done = self.is_done or self.is_ready
        return self.is_done

    def has_failed(self) -> bool:
        return self.error is not None

    def linger(self, since: float) -> None:
        self.lingered.append(since)
        self.looked.set()
        time.sleep(0.001)  # as a real one waits: the other threads have their turn


def await_threads() -> None:
    """Wait for all threads of progress: one that runs callbacks has another take over."""
    for thread in threading.enumerate():
        if thread.name == "shm-progress":
            thread.join(5)


@pytest.fixture
def by_hand() -> ByHand:
    return ByHand()


def test_a_wait_completes_it_and_passes_its_timeout_on(by_hand: ByHand) -> None:
    work = ShmWork(by_hand, ["result"])
    assert work.result() == ["result"]
    assert work.wait() is True
    assert work.wait(datetime.timedelta(seconds=3)) is True
    assert work.wait(datetime.timedelta(seconds=-1)) is True
    work.synchronize()
    assert by_hand.timeouts == [None, 3.0, None, None]


def test_a_work_says_how_it_is(by_hand: ByHand) -> None:
    work = ShmWork(by_hand, [])
    assert (work.is_completed(), work.is_success(), work.exception()) == (False, False, None)
    by_hand.is_ready = True
    assert not work.is_success()
    assert (work.is_completed(), work.is_success()) == (True, True)
    by_hand.error = ValueError("failed")
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, False, by_hand.error)
    by_hand.is_done = by_hand.is_ready = False
    assert work.is_completed()
    with pytest.raises(ValueError, match="failed"):
        work.wait()
    assert work.source_rank() == work._source_rank() == -1
    by_hand.source = 4  # type: ignore[attr-defined]
    assert work.source_rank() == work._source_rank() == 4


def test_a_future_of_what_is_done_is_done_at_once(by_hand: ByHand) -> None:
    by_hand.is_ready = True
    work = ShmWork(by_hand, ["result"])
    future = work.get_future()
    assert future.done()
    assert future.value() == ["result"]
    assert work.get_future() is future
    assert not by_hand.lingered


def test_a_future_of_what_has_failed_raises_that(by_hand: ByHand) -> None:
    by_hand.is_ready, by_hand.error = True, ValueError("failed")
    future = ShmWork(by_hand, []).get_future()
    with pytest.raises(RuntimeError, match="ValueError: failed"):
        future.wait()


def test_a_future_is_settled_by_a_wait_also_where_that_fails(by_hand: ByHand) -> None:
    work = ShmWork(by_hand, ["result"])
    work.settle()
    assert work._future is None
    by_hand.error = ValueError("failed")
    future = work.get_future()
    work.settle()
    assert not future.done()
    with pytest.raises(ValueError, match="failed"):
        work.wait()
    assert future.done()
    work.settle()
    progress.rest()


def test_a_work_that_has_waited_is_done() -> None:
    work = Completed()
    assert isinstance(work, dist.Work)
    assert work.wait() is work.wait(datetime.timedelta(seconds=1)) is True
    assert work.is_completed() is work.is_success() is True
    assert work.get_future().done()
    assert work.get_future().value() is None


def test_a_bundle_is_done_when_all_are() -> None:
    first, second = ByHand(), ByHand()
    bundle = Bundle([ShmWork(first, []), Completed(), ShmWork(second, [])])
    assert Bundle([]).is_done
    assert not bundle.is_done
    assert bundle.error is None
    second.is_ready = True
    assert not bundle.try_complete()
    assert second.is_done
    assert not bundle.is_done
    assert not bundle.has_failed()
    bundle.linger(5.0)
    assert (first.lingered, second.lingered) == ([5.0], [])
    first.error = ValueError("failed")
    assert bundle.error is first.error
    assert bundle.has_failed()
    first.error = None
    bundle.complete(3.0)
    assert (first.timeouts, second.timeouts) == ([3.0], [3.0])
    assert bundle.is_done
    assert bundle.try_complete()
    bundle.linger(5.0)
    assert (first.lingered, second.lingered) == ([5.0], [])
    second.error = ValueError("failed")
    assert bundle.error is second.error


def test_a_thread_completes_futures_and_ends() -> None:
    pending = [ByHand(), ByHand()]
    works = [ShmWork(one, [number]) for number, one in enumerate(pending)]
    before = time.monotonic()
    futures = [work.get_future() for work in works]
    assert pending[0].looked.wait(5)
    assert pending[1].looked.wait(5)  # each in turn
    thread = progress._thread
    assert thread is not None
    assert (thread.name, thread.daemon) == ("shm-progress", True)
    assert [one.name for one in threading.enumerate()].count("shm-progress") == 1
    assert before <= pending[0].lingered[0] <= time.monotonic()
    assert len(progress._queue) == 2
    assert progress._watching == 1
    pending[1].is_ready = True
    assert futures[1].wait() == [1]
    assert not futures[0].done()
    pending[0].is_ready = True
    assert futures[0].wait() == [0]
    last = progress._thread
    assert last is not None
    progress.rest()
    assert not last.is_alive()
    await_threads()
    assert (progress._watching, progress._queue) == (0, [])


def test_a_callback_may_wait_for_another_future() -> None:
    first, second = ByHand(), ByHand()
    later = ShmWork(second, ["later"])
    future = ShmWork(first, ["first"]).get_future()

    def callback(done: torch.futures.Future) -> object:
        second.is_ready = True
        return later.get_future().wait()

    chained = future.then(callback)
    waiting = ShmWork(ByHand(), [])
    waiting.get_future()
    first.is_ready = True
    assert chained.wait() == ["later"]
    waiting.pending.is_ready = True  # type: ignore[attr-defined]
    assert waiting.get_future().wait() == []
    await_threads()
    assert progress._watching == 0


def test_threads_that_have_work_are_not_waited_for(by_hand: ByHand) -> None:
    own = ProgressThreads()
    own.rest()
    work = ShmWork(by_hand, [])
    own.add(work)
    thread = own._thread
    own.rest()
    assert thread is not None
    assert thread.is_alive()
    own.add(ShmWork(by_hand, []))
    assert own._thread is thread
    by_hand.is_ready = True
    thread.join(5)
    own.rest()
    assert not own._queue
    own.add(ShmWork(by_hand, []))
    assert own._thread is not thread
    assert own._thread is not None
    own._thread.join(5)
    own._queue, own._watching = [(work, 0.0)], 1
    own.forget()
    assert (own._queue, own._watching, own._thread) == ([], 0, None)


def test_a_bundle_of_works_that_are_done_does_not_linger(pair: list[Collectives]) -> None:
    works = [ShmWork(end.barrier(), []) for end in pair]
    bundle = Bundle(works)
    for work in works:
        work.wait()
    bundle.linger(time.monotonic())  # another thread has completed them since `is_done` was read
    assert bundle.is_done
