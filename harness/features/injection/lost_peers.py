"""Waits of a rank for collectives that never end, as another rank has gone.

Inside a rank; imports torch.

A collective of gloo whose connection closes just as it begins to send may never end, and nothing wakes its
thread: `gloo::transport::tcp::UnboundBuffer::waitSend`, seen in torch 2.13 in a third of the runs in which a
rank raised an exception in backward while others reduced gradients. `Work.wait` cannot be interrupted, so
inside of `faults.expect` ranks wait in Python for the collective's future.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

__tracebackhide__ = True  # under pytest a failure points to the call

GIVES_UP_AFTER = 5.0
"""Seconds from a loss; others that still take part in the collective may be slow."""


class LostPeers:
    """The ranks that have gone, by word of the controller, and the waits for collectives with them."""

    def __init__(self) -> None:
        self._lost: dict[int, float] = {}
        self._changed = threading.Condition()

    def note(self, rank: int) -> None:
        """Note that the connections of a rank are closed; it has died, or has left `faults.expect`."""
        with self._changed:
            self._lost.setdefault(rank, time.monotonic())
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget them: the connections are new."""
        with self._changed:
            self._lost.clear()

    def await_end(self, work: dist.Work, members: set[int], title: str) -> None:
        """Wait until a collective is over, with a result or an error.

        Args:
            members: numbers of the ranks that take part.

        Raises:
            RuntimeError: one of them was lost a while ago, and the collective is not over yet.
        """
        future, begun = _future_of(work), time.monotonic()

        def wake(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        future.add_done_callback(wake)
        with self._changed:
            while not future.done():
                lost = sorted(self._lost.keys() & members)
                left = None  # without a limit: a rank that polled would not be seen to stand still
                if lost:
                    since = max(begun, min(self._lost[rank] for rank in lost))
                    left = since + GIVES_UP_AFTER - time.monotonic()
                    if left <= 0:
                        raise RuntimeError(
                            f"gloo: Connection closed by peer: {title} did not end within "
                            f"{GIVES_UP_AFTER:g} s of the loss of rank {', '.join(map(str, lost))}"
                        )
                self._changed.wait(left)


def _future_of(work: dist.Work) -> torch.futures.Future[Any]:
    """Return the future of a collective, or of a thread that waits for it where it has none.

    `reduce_scatter_tensor` of gloo has none, whose wait also copies the result, as often as it is called.
    """
    with suppress(RuntimeError):  # "Work::getFuture not implemented", seen in torch 2.13
        return work.get_future()
    future: torch.futures.Future[Any] = torch.futures.Future()

    def wait() -> None:
        with suppress(Exception), torch.no_grad():  # the caller's own wait, which is next, raises it again
            work.wait()
        future.set_result(None)

    threading.Thread(target=wait, name="waits-in-gloo", daemon=True).start()
    return future
