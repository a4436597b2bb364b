"""The handle of a collective that is disturbed. Inside a rank; imports torch."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import TensorWeakRef

__tracebackhide__ = True  # under pytest a failure points to the call

_NO_TIMEOUT = datetime.timedelta(0)


def _nothing() -> None: ...


class Watched(dist.Work):
    """A handle in the place of another one.

    Args:
        work: that of the collective, None of one that was left out, or has returned none.
        result: what its future has.
        over: called once, when a caller first learns that the collective is over, before it goes on.
        begin_wait: called before each wait that has no timeout of its own, and for each future on a thread.
        waited: called whenever a wait has returned.
    """

    def __init__(
        self,
        work: dist.Work | None,
        result: list[Tensor],
        over: Callable[[], None] = _nothing,
        waited: Callable[[], None] = _nothing,
        begin_wait: Callable[[], None] = _nothing,
    ) -> None:
        super().__init__()
        self._work = work
        self._result: list[Tensor] | None = result
        self._weak: list[TensorWeakRef] = []
        self._source = -1
        self._over = over
        self._waited, self._begin_wait = waited, begin_wait
        self._settling = threading.RLock()
        self._is_settled = False

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the collective; its outputs are there then."""
        if (work := self._work) is not None:
            if timeout == _NO_TIMEOUT:
                self._begin_wait()
            work.wait(timeout)
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

    def release(self) -> bool:
        """Let go of the tensors, where a caller has learned that the collective is over; return whether so.

        The handle still answers: C++ code that it was given to, for several tensors, waits once for each.
        """
        if not self._settling.acquire(blocking=False):  # a fault may hold up the thread that waits
            return False
        try:
            # On a GPU, a wait orders streams, and another stream may have to wait later.
            if not self._is_settled or (self._work is not None and not self._work.is_completed()):
                return False
            if self._work is not None:
                with suppress(RuntimeError):  # it has received nothing
                    self._source = int(self._work._source_rank())
            self._weak = [TensorWeakRef(each) for each in self._result or ()]
            self._work = self._result = None
            return True
        finally:
            self._settling.release()

    def is_completed(self) -> bool:
        """Return whether the collective is over; if so its outputs are there."""
        if (work := self._work) is not None:
            if not work.is_completed():
                return False
            try:
                work.wait()  # not `is_success`, which nccl does not have
            except Exception:  # which `wait` raises to the caller
                return True
        self._settle()
        return True

    def is_success(self) -> bool:
        return (work := self._work) is None or bool(work.is_success())

    def exception(self) -> Any:
        return None if (work := self._work) is None else work.exception()

    def synchronize(self) -> None:
        if (work := self._work) is not None:
            work.synchronize()
        self._settle()

    def block_current_stream(self) -> None:
        if (work := self._work) is not None:
            work.block_current_stream()
        self._settle()

    def result(self) -> Any:
        self._settle()
        return self._outputs()

    def _outputs(self) -> list[Tensor]:
        if (result := self._result) is not None:
            return result
        found = [tensor for each in self._weak if (tensor := each()) is not None]
        if len(found) < len(self._weak):
            raise RuntimeError("the outputs of this collective were freed after it was waited for")
        return found

    def source_rank(self) -> int:
        """Return the rank in the group that has sent what was received."""
        return self._source if (work := self._work) is None else int(work._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that has the outputs."""
        outputs = self._outputs()
        if (work := self._work) is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(None)
        else:
            future = work.get_future()
        raised: list[Exception] = []
        over = future if self._begin_wait is _nothing else self._awaited(future, raised)

        def settle(_: torch.futures.Future[Any]) -> Any:
            for error in raised:
                raise error
            future.value()  # raises what the collective has met
            self._settle()
            return outputs

        return over.then(settle)

    def _awaited(
        self, future: torch.futures.Future[Any], raised: list[Exception]
    ) -> torch.futures.Future[Any]:
        """Return a future that is over when the other one is, or with an error as its wait is given up."""
        over: torch.futures.Future[Any] = torch.futures.Future()

        def wait() -> None:
            try:
                self._begin_wait()
                future.wait()
            except Exception as error:
                raised.append(error)
            over.set_result(None)

        threading.Thread(target=wait, name="waits-in-gloo", daemon=True).start()
        return over
