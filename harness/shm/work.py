"""Work objects, for which torch.distributed and DDP wait, and the threads that complete them."""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

__tracebackhide__ = True  # under pytest a failure points to the call

_NO_TIMEOUT = datetime.timedelta(0)


class Pending(Protocol):
    """A collective or a message that this rank has called."""

    @property
    def is_done(self) -> bool:
        """True if it is complete, or has failed."""

    @property
    def error(self) -> BaseException | None:
        """The exception that it has met."""

    def complete(self, timeout: float | None = None) -> None:
        """Wait for the peers, and fill the outputs; once. Raises what it has met."""

    def try_complete(self) -> bool:
        """Complete it if that takes no waiting; return whether it is done, or has failed."""

    def has_failed(self) -> bool:
        """Return whether it will never complete, as a peer is gone; without waiting."""

    def linger(self, since: float) -> None:
        """Sleep until a peer has done something, for some milliseconds; fail if none can or time is up.

        Args:
            since: When it was called, in the seconds of `time.monotonic`.
        """


class ShmWork(dist.Work):
    """A collective or a message that may not be complete.

    Args:
        pending: What to wait for.
        result: What its future has.
    """

    def __init__(self, pending: Pending, result: Any) -> None:
        super().__init__()
        self.pending = pending
        self._result = result
        self._future: torch.futures.Future[Any] | None = None
        self._settled: torch.futures.Future[Any] | None = None
        self._settling = threading.Lock()
        self._is_settled = False

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the peers, and fill the outputs."""
        try:
            self.pending.complete(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        finally:
            if self._future is not None:
                self.settle()
        return True

    def is_completed(self) -> bool:
        """Return whether it is complete, or has failed; it is completed here if all peers have called it."""
        return self.pending.try_complete() or self.pending.has_failed()

    def is_success(self) -> bool:
        return self.pending.is_done and self.pending.error is None

    def exception(self) -> BaseException | None:
        return self.pending.error

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """Return the rank in the group that has sent what was received."""
        return int(getattr(self.pending, "source", -1))

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes without a wait, in a thread of this process."""
        with self._settling:
            known = self._future
            if known is None:
                # What `Future.set_exception` sets is a value to C++: DDP's reducer would take it for tensors.
                self._settled = torch.futures.Future()
                self._future = self._settled.then(self._outcome)
        if known is None:
            if self.pending.try_complete():
                self.settle()
            else:
                progress.add(self)
        future = self._future
        assert future is not None
        return future

    def settle(self) -> None:
        """Give the future what came out, once; its callbacks run in this thread."""
        with self._settling:
            settled = self._settled
            if settled is None or self._is_settled or not self.pending.is_done:
                return
            self._is_settled = True
        settled.set_result(None)

    def _outcome(self, _: torch.futures.Future[Any]) -> Any:
        if self.pending.error is not None:
            raise self.pending.error
        return self._result


class Completed(dist.Work):
    """The work of a call that has waited already."""

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Bundle:
    """Several works that are waited for as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = [work.pending for work in works if isinstance(work, ShmWork)]

    @property
    def is_done(self) -> bool:
        return all(work.is_done for work in self._works)

    @property
    def error(self) -> BaseException | None:
        return next((work.error for work in self._works if work.error is not None), None)

    def complete(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.complete(timeout)

    def try_complete(self) -> bool:
        done = [work.try_complete() for work in self._works]
        return all(done)

    def has_failed(self) -> bool:
        failed = [work.is_done or work.has_failed() for work in self._works]
        return all(failed)

    def linger(self, since: float) -> None:
        for work in self._works:
            if not work.is_done:
                work.linger(since)
                return


class ProgressThreads:
    """The threads of this process that complete works with futures that others wait for.

    One is enough, but for callbacks: a callback may wait for another future, which then needs another thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start from nothing: after a fork there are no threads, and the works are the parent's."""
        self._lock = threading.Lock()
        self._queue: list[tuple[ShmWork, float]] = []
        self._watching = 0
        """Number of threads that look after the queue, and do not run callbacks."""
        self._thread: threading.Thread | None = None

    def add(self, work: ShmWork) -> None:
        """Complete a work as soon as its peers have called it."""
        with self._lock:
            self._queue.append((work, time.monotonic()))
            self._ensure_watched()

    def _ensure_watched(self) -> None:
        if not self._watching and self._queue:
            self._watching += 1
            # A daemon: what a peer never calls must not keep the interpreter from ending.
            self._thread = threading.Thread(target=self._watch, name="shm-progress", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """Return when the thread is over, if it has nothing to do."""
        thread = self._thread
        if thread is not None and not self._queue and thread is not threading.current_thread():
            thread.join(1.0)

    def _watch(self) -> None:
        turn = 0
        while True:
            with self._lock:
                queue = list(self._queue)
                if not queue:
                    self._watching -= 1
                    return
            done = [entry for entry in queue if entry[0].pending.try_complete()]
            if done:
                self._settle(done)
            else:
                work, since = queue[turn % len(queue)]  # each in turn, so that each is seen to fail
                work.pending.linger(since)
                turn += 1

    def _settle(self, done: list[tuple[ShmWork, float]]) -> None:
        with self._lock:
            mine = [entry for entry in done if entry in self._queue]  # another thread may have been faster
            self._queue = [entry for entry in self._queue if entry not in mine]
            self._watching -= 1
            self._ensure_watched()
        try:
            for work, _ in mine:
                work.settle()
        finally:
            with self._lock:
                self._watching += 1


progress = ProgressThreads()
os.register_at_fork(after_in_child=progress.forget)
