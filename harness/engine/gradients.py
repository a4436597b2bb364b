"""The gradients of one group: from full leaves, through the reduction, to where the user sees them.

Where unreduced ones wait is for the front to say: shown_gradients.py and held_gradients.py. Runs on ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.collectives import BufferPool, Sum
from harness.engine.layout import copy_in
from harness.engine.local_shard import LocalShard
from harness.engine.param import attach_gradient
from harness.engine.unsharded import UnshardedParams, fill_with_nan


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
    def collect_unsynced(self, full: UnshardedParams) -> None:
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
    def collect(self, full: UnshardedParams, pool: BufferPool) -> None:
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

    def _pack(self, full: UnshardedParams, lender: BufferPool) -> Tensor:
        """Return all leaves' gradients as one 1-D tensor in the reduce dtype, and clear the leaves."""
        layout = self._shard.layout
        flat = lender.take(layout.padded_numel, full.dtypes.reduce, self._shard.device)
        copy_in([_dense(leaf.grad) for leaf in full.leaves], flat, layout)
        for leaf in full.leaves:
            leaf.grad = None
        return flat

    def _give_back(self, flat: Tensor, pool: BufferPool) -> None:
        if self._shard.settings.poison:
            fill_with_nan(flat)
        pool.give(flat)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.layout is torch.strided else gradient.to_dense()


class AccumulatedGradients(Gradients):
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
        return [e.gradient for e in self._shard.params if e.gradient is not None]

    def collect(self, full: UnshardedParams, pool: BufferPool) -> None:
        if self._waits:
            self.collect_unsynced(full)
        else:
            super().collect(full, pool)

    @torch.no_grad()
    def collect_unsynced(self, full: UnshardedParams) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_unsynced(flat)
        self._held = flat

    def drop_unsynced(self) -> None:
        self._held = self._carried = None

    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        converted = {e.parameter: fn(e.gradient) for e in self._shard.params if e.gradient is not None}
        for parameter in converted:
            parameter.grad = None
        return converted

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for param in self._shard.params:
            if param.parameter in gradients:
                param.show_gradient(gradients[param.parameter])

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
        for (param, view), piece in zip(self._shard.views(), self._shard.pieces, strict=True):
            if not param.parameter.requires_grad:
                continue
            fresh = reduced[piece.shard_start : piece.shard_stop].view(view.shape)
            if (shown := param.gradient) is None:
                param.show_gradient(fresh)
            else:
                shown.add_(fresh)


class VisibleGradients(Gradients):
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
    def collect_unsynced(self, full: UnshardedParams) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_unsynced(flat)
        self._show_full(flat)

    def drop_unsynced(self) -> None:
        """Nothing: the user sees them all, and may keep them."""

    @torch.no_grad()
    def full(self) -> list[Tensor | None]:
        """Return one full gradient per param, in the param's shape; None where no rank has one.

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
        visible = (e.parameter if shard.settings.use_orig_params else shard.flat for e in shard.params)
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
        shapes = {param.parameter: param.shape for param in self._shard.params}
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
            for param, start, numel in zip(shard.params, layout.starts, layout.numels, strict=True):
                if param.parameter.requires_grad:
                    yield param.parameter, slice(start, start + numel)
        elif shard.flat.requires_grad:
            yield shard.flat, slice(0, layout.numel)

    def _shard_spans(self) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each visible trainable parameter that this rank holds a part of, and where in its shard."""
        shard = self._shard
        if shard.settings.use_orig_params:
            for param, piece in zip(shard.params, shard.pieces, strict=True):
                if param.parameter.requires_grad and len(piece):
                    yield param.parameter, slice(piece.shard_start, piece.shard_stop)
        elif shard.flat.requires_grad:
            yield shard.flat, slice(0, shard.layout.shard_numel)
