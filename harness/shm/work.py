"""Work objects: what torch.distributed, DDP and functional collectives wait for."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from harness.shm.collectives import Operation


class ShmWork(dist.Work):
    """A collective that may not be complete."""

    def __init__(self, operation: Operation, result: list[Tensor]) -> None:
        super().__init__()
        self._operation = operation
        self._result = result

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Wait for the peers, and fill the outputs."""
        self._operation.complete(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        """Return whether it is complete; it is completed here if all peers have called it."""
        return self._operation.try_complete()

    def is_success(self) -> bool:
        return self._operation.is_done and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def result(self) -> list[Tensor]:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future that is complete: it waits for the collective first."""
        future: torch.futures.Future[object] = torch.futures.Future()
        self.wait()
        future.set_result(self._result)
        return future


class Completed(dist.Work):
    """The work of a call that has waited already."""

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[object]:
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(None)
        return future
