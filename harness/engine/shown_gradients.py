"""Gradients that the user always sees, reduced or not. Runs on ranks."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.full import FullParameters
from harness.engine.gradients import Gradients
from harness.engine.parameters import attach_gradient
from harness.engine.pool import BufferPool
from harness.engine.shard import LocalShard


class ShownGradients(Gradients):
    """Let what the user sees be the only store: `zero_grad`, a scaler or a clip in between is honoured.

    Inside ``no_sync`` the visible gradients are full and unreduced; what had been reduced before waits in
    ``_synced`` until the next reduction.
    """

    def __init__(self, shard: LocalShard) -> None:
        super().__init__(shard)
        self._unsynced = False
        self._synced: dict[nn.Parameter, Tensor] = {}
        self._shown_version = 0

    @property
    def unreduced(self) -> bool:
        return self._unsynced and bool(self.visible())

    def visible(self) -> list[Tensor]:
        return [p.grad for p, _ in self._full_spans() if p.grad is not None]

    @torch.no_grad()
    def collect_unsynced(self, full: FullParameters) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_unsynced(flat)
        self._show_full(flat)

    def drop_unsynced(self) -> None:
        """Nothing: the user sees them all, and may keep them."""

    @torch.no_grad()
    def full(self) -> list[Tensor | None]:
        """Return one full gradient per entry, in the entry's shape; None where no rank has one.

        Inside ``no_sync`` they are this rank's own.
        """
        shard = self._shard
        spans = self._full_spans() if self._unsynced else self._shard_spans()
        numel = shard.layout.padded_numel if self._unsynced else shard.layout.shard_numel
        flat = torch.zeros(numel, dtype=shard.dtypes.gradient, device=shard.device)
        for parameter, span in spans:
            if parameter.grad is not None:
                flat[span] = parameter.grad.reshape(-1).to(flat.device)
        full = flat if self._unsynced else shard.gather(flat)
        present = self._present_anywhere()
        return [view if there else None for view, there in zip(shard.in_full(full), present, strict=True)]

    def convert(self, fn: Callable[[Tensor], Tensor]) -> dict[nn.Parameter, Tensor]:
        self._synced = {p: fn(gradient) for p, gradient in self._synced.items()}
        converted = {p: fn(p.grad) for p, _ in self._full_spans() if p.grad is not None}
        for parameter in converted:
            parameter.grad = None
        return converted

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            attach_gradient(parameter, gradient)

    def _present_anywhere(self) -> list[bool]:
        shard = self._shard
        visible = (e.parameter if shard.settings.use_orig_params else shard.flat for e in shard.entries)
        present = torch.tensor([float(p.grad is not None) for p in visible], device=shard.device)
        return [bool(p) for p in collectives.total(present, shard.settings.axes.groups, largest=True)]

    def _add_shard(self, reduced: Tensor) -> None:
        reduced = reduced.to(self._shard.flat.device)
        for parameter, span in self._shard_spans():
            fresh = reduced[span].view_as(parameter)
            if parameter.grad is None:
                attach_gradient(parameter, fresh)
            else:
                parameter.grad.add_(fresh)

    def _show_full(self, full: Tensor) -> None:
        spans = list(self._full_spans())
        self._synced = {p: p.grad for p, _ in spans if p.grad is not None}
        self._unsynced = True
        self._shown_version = full._version
        shapes = {entry.parameter: entry.shape for entry in self._shard.entries}
        for parameter, span in spans:
            gradient = full[span]
            attach_gradient(parameter, gradient.view(shapes.get(parameter, gradient.shape)))

    def _add_unsynced(self, full: Tensor) -> None:
        """Add visible unreduced gradients to ``full`` and show the reduced ones that wait behind them."""
        if not self._unsynced:
            return
        for parameter, span in self._full_spans():
            if self._was_zeroed(parameter.grad):
                self._synced.pop(parameter, None)
            if parameter.grad is not None:
                full[span] += parameter.grad.reshape(-1).to(full.device)
            attach_gradient(parameter, self._synced.get(parameter))
        self._unsynced = False
        self._synced = {}

    def _was_zeroed(self, shown: Tensor | None) -> bool:
        """Tell whether the user zeroed a full gradient, and so means to forget what waits behind it."""
        return shown is None or (shown._version != self._shown_version and not shown.any())

    def _full_spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each visible trainable parameter with where its gradient lies in the full flat tensor."""
        shard, layout = self._shard, self._shard.layout
        if shard.settings.use_orig_params:
            for entry, start, numel in zip(shard.entries, layout.starts, layout.numels, strict=True):
                if entry.parameter.requires_grad:
                    yield entry.parameter, slice(start, start + numel)
        elif shard.flat.requires_grad:
            yield shard.flat, slice(0, layout.numel)

    def _shard_spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each visible trainable parameter that this rank holds a part of, and where in its shard."""
        shard = self._shard
        if shard.settings.use_orig_params:
            for entry, piece in zip(shard.entries, shard.pieces, strict=True):
                if entry.parameter.requires_grad and len(piece):
                    yield entry.parameter, slice(piece.shard_start, piece.shard_stop)
        elif shard.flat.requires_grad:
            yield shard.flat, slice(0, shard.layout.shard_numel)
