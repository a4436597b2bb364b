"""Gradients that wait out of the user's sight until they are reduced. Runs on ranks."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from harness.engine.gradients import Gradients
from harness.engine.pool import BufferPool
from harness.engine.shard import LocalShard


class HeldGradients(Gradients):
    """Show reduced gradients, one per parameter; hold unreduced ones in the reduce dtype."""

    def __init__(self, shard: LocalShard) -> None:
        super().__init__(shard)
        self._held: Tensor | None = None

    @property
    def unreduced(self) -> bool:
        return self._held is not None

    def visible(self) -> list[Tensor]:
        return [e.gradient for e in self._shard.entries if e.gradient is not None]

    @torch.no_grad()
    def collect_unsynced(self, leaves: Sequence[Tensor]) -> None:
        self.settle()
        full = self._pack(leaves, BufferPool())
        self._add_unsynced(full)
        self._held = full

    def drop_unsynced(self) -> None:
        self._held = None

    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        converted = {e.parameter: fn(e.gradient) for e in self._shard.entries if e.gradient is not None}
        for parameter in converted:
            parameter.grad = None
        return converted

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for entry in self._shard.entries:
            if entry.parameter in gradients:
                entry.show_gradient(gradients[entry.parameter])

    def _add_unsynced(self, full: Tensor) -> None:
        if self._held is not None:
            full += self._held
            self._held = None

    def _add_shard(self, reduced: Tensor) -> None:
        reduced = reduced.to(self._shard.flat.device)
        for (entry, view), piece in zip(self._shard.views(), self._shard.pieces, strict=True):
            if not entry.parameter.requires_grad:
                continue
            fresh = reduced[piece.shard_start : piece.shard_stop].view(view.shape)
            if (shown := entry.gradient) is None:
                entry.show_gradient(fresh)
            else:
                shown.add_(fresh)
