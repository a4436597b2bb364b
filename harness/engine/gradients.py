"""The gradients of one group: from full leaves, through the reduction, to where the user sees them.

Where unreduced ones wait is for the front to say: shown_gradients.py and held_gradients.py. Runs on ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from harness.engine import collectives, wire
from harness.engine.full import FullParameters, fill_with_nan
from harness.engine.pool import BufferPool
from harness.engine.shard import LocalShard


class Gradients(ABC):
    """Reduce the gradients that belong to ``shard`` and add them to what the user sees."""

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._started: Callable[[], Tensor] | None = None

    def like(self, shard: LocalShard) -> Self:
        """Return what does the same for ``shard``, without gradients."""
        return type(self)(shard)

    @property
    @abstractmethod
    def unreduced(self) -> bool:
        """Whether there are gradients that the other ranks have not been told."""

    @abstractmethod
    def visible(self) -> list[Tensor]:
        """Return the gradients that the user sees now."""

    @abstractmethod
    def collect_unsynced(self, full: FullParameters) -> None:
        """Add gradients from the leaves of ``full`` to this rank's own full gradients."""

    @abstractmethod
    def drop_unsynced(self) -> None:
        """Forget what `collect_unsynced` gathered and the user cannot see."""

    @abstractmethod
    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        """Take the visible gradients off their parameters and return them converted."""

    @abstractmethod
    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Put gradients on their parameters."""

    @abstractmethod
    def _add_unsynced(self, flat: Tensor) -> None:
        """Add unreduced gradients to ``flat``, which is full and as it travels, and hold none any more."""

    @abstractmethod
    def _add_shard(self, reduced: Tensor) -> None:
        """Add ``reduced``, a 1-D shard in the gradient dtype, to what the user sees."""

    @torch.no_grad()
    def collect(self, full: FullParameters, pool: BufferPool) -> None:
        """Take gradients from the leaves of ``full`` and start to average them; `settle` shows them."""
        self.settle()
        flat = self._pack(full, BufferPool() if self._shard.whole else pool)
        self._add_unsynced(flat)
        finish = self._start(flat, full.dtypes.gradient, pool)

        def finished() -> Tensor:
            reduced = finish()
            if not self._shard.whole:
                self._give_back(flat, pool)
            return reduced

        self._started = finished

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for what `collect` started and add it to the visible gradients."""
        started, self._started = self._started, None
        if started:
            self._add_shard(started())

    def drop_started(self) -> None:
        """Wait for what `collect` started in a backward that failed, and forget it."""
        started, self._started = self._started, None
        if started:
            started()

    def _start(self, flat: Tensor, dtype: torch.dtype, pool: BufferPool) -> Callable[[], Tensor]:
        """Start to average ``flat``, as it travels; the result is a shard in ``dtype`` for `_add_shard`."""
        return collectives.start_mean(flat, self._shard.settings.axes, dtype, pool)

    def _pack(self, full: FullParameters, lender: BufferPool) -> Tensor:
        """Return all leaves' gradients as one 1-D tensor in the reduce dtype, and clear the leaves."""
        layout = self._shard.layout
        flat = lender.take(layout.padded_numel, full.dtypes.reduce, self._shard.device)
        wire.pack([_dense(leaf.grad) for leaf in full.leaves], flat, layout)
        for leaf in full.leaves:
            leaf.grad = None
        return flat

    def _give_back(self, flat: Tensor, pool: BufferPool) -> None:
        if self._shard.settings.poison:
            fill_with_nan(flat)
        pool.give(flat)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()
