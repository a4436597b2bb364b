"""Gradients that wait out of the user's sight until they are reduced. Runs on ranks."""

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.collectives import Sum
from harness.engine.full import FullParameters
from harness.engine.gradients import Gradients
from harness.engine.pool import BufferPool
from harness.engine.shard import LocalShard


class HeldGradients(Gradients):
    """Show reduced gradients, one per parameter; hold unreduced ones in the reduce dtype.

    ``divisor``: what sums over ranks are divided by; None is the number of ranks. ``across``: whether what
    ranks of the shard axis have reduced is also reduced across replicas, or waits.
    """

    def __init__(self, shard: LocalShard) -> None:
        super().__init__(shard)
        self.divisor: float | None = None
        self.across = True
        self._held: Tensor | None = None
        self._carried: Tensor | None = None

    def like(self, shard: LocalShard) -> Self:
        copied = super().like(shard)
        copied.divisor, copied.across = self.divisor, self.across
        return copied

    @property
    def unreduced(self) -> bool:
        held = self._held is not None and not self._waits
        return held or (self._carried is not None and self.across)

    def visible(self) -> list[Tensor]:
        return [e.gradient for e in self._shard.entries if e.gradient is not None]

    def collect(self, full: FullParameters, pool: BufferPool) -> None:
        if self._waits:
            self.collect_unsynced(full)
        else:
            super().collect(full, pool)

    @torch.no_grad()
    def collect_unsynced(self, full: FullParameters) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_unsynced(flat)
        self._held = flat

    def drop_unsynced(self) -> None:
        self._held = self._carried = None

    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        converted = {e.parameter: fn(e.gradient) for e in self._shard.entries if e.gradient is not None}
        for parameter in converted:
            parameter.grad = None
        return converted

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for entry in self._shard.entries:
            if entry.parameter in gradients:
                entry.show_gradient(gradients[entry.parameter])

    def _add_unsynced(self, flat: Tensor) -> None:
        if self._held is not None:
            flat += self._held
            self._held = None

    def _start(self, flat: Tensor, dtype: torch.dtype, pool: BufferPool) -> Callable[[], Tensor]:
        axes = self._shard.settings.axes
        if self._stays_inside:
            return collectives.start_inside(flat, axes, pool, Sum(self.divisor))
        sum_, self._carried = Sum(self.divisor, self._carried), None
        return collectives.start_mean(flat, axes, dtype, pool, sum_)

    @property
    def _waits(self) -> bool:
        """Whether nothing is to be sent: replicas are not told yet, and inside one there is one shard."""
        return self._holds_back and self._shard.settings.axes.shard is None

    @property
    def _stays_inside(self) -> bool:
        return self._holds_back and self._shard.settings.axes.shard is not None

    @property
    def _holds_back(self) -> bool:
        return not self.across and self._shard.settings.axes.replicate is not None

    def _add_shard(self, reduced: Tensor) -> None:
        if self._stays_inside:
            self._carried = reduced if self._carried is None else self._carried.add_(reduced)
            return
        reduced = reduced.to(self._shard.flat.device)
        for (entry, view), piece in zip(self._shard.views(), self._shard.pieces, strict=True):
            if not entry.parameter.requires_grad:
                continue
            fresh = reduced[piece.shard_start : piece.shard_stop].view(view.shape)
            if (shown := entry.gradient) is None:
                entry.show_gradient(fresh)
            else:
                shown.add_(fresh)
