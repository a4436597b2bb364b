"""Complete what has a future, in threads that live as long as there is any. Imports torch only."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.shm.work import ShmWork


class Progress:
    """The threads of this process that complete works whose futures others wait for.

    One is enough, but for callbacks: a callback may wait for another future, which then needs another thread.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start from nothing: after a fork there are no threads, and the works are the parent's."""
        self._lock = threading.Lock()
        self._queue: list[tuple[ShmWork, float]] = []
        self._watching = 0
        """How many threads look after the queue, and do not run callbacks."""
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


progress = Progress()
os.register_at_fork(after_in_child=progress.forget)
