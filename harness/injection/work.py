"""The handle of a collective that is disturbed. Inside a rank; imports torch."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__tracebackhide__ = True  # under pytest a failure points to the call

_NO_TIMEOUT = datetime.timedelta(0)


def _nothing() -> None: ...


class Watched(dist.Work):
    """A handle in the place of another one.

    Args:
        work: that of the collective, None of one that was left out, or has returned none.
        result: what its future has.
        over: called once, when a caller first learns that the collective is over, before it goes on.
        waited: called whenever a wait has returned.
    """

    def __init__(
        self,
        work: dist.Work | None,
        result: list[Tensor],
        over: Callable[[], None] = _nothing,
        waited: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__()
        self._work = work
        self._result = result
        self._over = over
        self._waited = waited
        self._settling = threading.RLock()
        self._is_settled = False

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the collective; its outputs are there then."""
        if self._work is not None:
            self._work.wait(timeout)
        self._settle()
        self._waited()
        return True

    def _settle(self) -> None:
        with self._settling:
            if self._is_settled:
                return
            self._is_settled = True
            over, self._over = self._over, _nothing  # the tensors that it holds may go
            over()  # another thread that waits for this must not go on before

    def is_completed(self) -> bool:
        """Return whether the collective is over; if so its outputs are there."""
        if self._work is not None and not self._work.is_completed():
            return False
        if self.is_success():
            self._settle()
        return True

    def is_success(self) -> bool:
        return self._work is None or bool(self._work.is_success())

    def exception(self) -> Any:
        return None if self._work is None else self._work.exception()

    def synchronize(self) -> None:
        if self._work is not None:
            self._work.synchronize()
        self._settle()

    def block_current_stream(self) -> None:
        if self._work is not None:
            self._work.block_current_stream()
        self._settle()

    def result(self) -> Any:
        self._settle()
        return self._result

    def source_rank(self) -> int:
        """Return the rank in the group that has sent what was received."""
        return -1 if self._work is None else int(self._work._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has the outputs."""
        if self._work is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(None)
        else:
            future = self._work.get_future()

        def settle(done: torch.futures.Future[Any]) -> Any:
            done.value()  # raises what the collective has met
            self._settle()
            return self._result

        return future.then(settle)
