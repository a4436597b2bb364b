"""The gradients of one group: from leaves, through the reduction, to where the user sees them. Runs on ranks.

The fronts differ in where unreduced ones are: `VisibleGradients` of the wrapper shows them to the user,
`AccumulatedGradients` of `fully_shard` and `replicate` holds them back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lockstep.engine import collectives
from lockstep.engine.arrivals import Arrivals
from lockstep.engine.collectives import BufferPool, Sum
from lockstep.engine.layout import Layout, RowLayout, Usage, copy_in
from lockstep.engine.mesh import Axis
from lockstep.engine.param import LocalShard, attach_gradient
from lockstep.engine.torch_internals import gradient_hooks, without_grad
from lockstep.engine.unsharded import UnshardedParams


class Gradients(ABC):
    """Reduce the gradients that belong to a shard and add them to what the user sees."""

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self.started: Callable[[], Tensor] | None = None
        """Finishes the reduction that `reduce` started and `settle` has not finished."""
        self.arrivals = Arrivals(shard)
        """Gradients that come to visible parameters, and not through the unit."""

    def like(self, shard: LocalShard) -> Self:
        """Return an object with the same options for `shard`, without gradients."""
        return type(self)(shard)

    @property
    @abstractmethod
    def unreduced(self) -> bool:
        """Whether this rank has gradients that the other ranks have not received."""

    def visible(self) -> list[Tensor]:
        """Return the gradients that the user sees now."""
        return list(self._shown().values())

    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        """Return the visible gradients converted, for `restore` to put in the place of those."""
        return {parameter: fn(gradient) for parameter, gradient in self._shown().items()}

    @abstractmethod
    def accumulate(self, full: UnshardedParams) -> None:
        """Add gradients from the leaves of `full` to this rank's own unreduced ones."""

    @abstractmethod
    def drop_accumulated(self) -> None:
        """Forget what `accumulate` added up and the user cannot see."""

    @abstractmethod
    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Put gradients on their parameters."""

    @abstractmethod
    def _shown(self) -> dict[nn.Parameter, Tensor]:
        """Return the visible gradients, this rank's own part of each, by parameter."""

    @abstractmethod
    def _add_accumulated(self, flat: Tensor) -> None:
        """Add the unreduced gradients to `flat`, which is full and packed, and hold none any more."""

    @abstractmethod
    def _add_shard(self, reduced: Tensor) -> None:
        """Add `reduced`, a 1-D shard in the gradient dtype, to what the user sees; call hooks."""

    @without_grad
    def reduce(self, full: UnshardedParams, pool: BufferPool) -> None:
        """Start to average gradients from the leaves of `full`; `settle` shows them."""
        self.settle()
        # Where nothing is sharded the result lies in the packed buffer itself, so the pool cannot have it.
        axis = self._shard.config.mesh.shard
        flat = self._pack(full, pool, axis) if axis else self._pack(full, BufferPool())
        self._add_accumulated(flat)
        finish = self._start(flat, full.dtypes.gradient, pool)

        def finished() -> Tensor:
            reduced = finish()
            pool.give(flat, self._shard.config.poison)
            return reduced

        self.started = finished

    @without_grad
    def settle(self) -> None:
        """Wait for the reduction that was started, and add its result to the visible gradients."""
        started, self.started = self.started, None
        if started:
            self._add_shard(started())

    def drop_started(self) -> None:
        """Wait for the reduction that was started in a backward that failed, and forget its result."""
        started, self.started = self.started, None
        if started:
            started()

    def _start(self, flat: Tensor, dtype: torch.dtype, pool: BufferPool) -> Callable[[], Tensor]:
        """Start to average the packed `flat`; the result is a shard in `dtype` for `_add_shard`."""
        return collectives.start_mean(flat, self._shard.config.mesh, dtype, pool)

    def _pack(self, full: UnshardedParams, pool: BufferPool, axis: Axis | None = None) -> Tensor:
        """Return leaves' gradients as one 1-D tensor in the reduce dtype, and clear the leaves.

        With `axis`, to be sent to its ranks.
        """
        pairs = ((leaf.grad, leaf) for leaf in full.leaves)
        gradients = [collectives.local_gradient(g, at) if isinstance(g, DTensor) else g for g, at in pairs]
        dense = [g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients]
        if self.arrivals.waiting:
            for index, gradient in self.arrivals.take().items():
                dense[index] = gradient if (own := dense[index]) is None else own + gradient
        layout, sent = self._message(dense)
        flat = pool.take(layout.padded_numel, full.dtypes.reduce, self._shard.device, axis)
        copy_in(sent, flat, layout)
        for leaf in full.leaves:
            leaf.grad = None
        return flat

    def _message(self, gradients: Sequence[Tensor | None]) -> tuple[Layout, Sequence[Tensor | None]]:
        """Return which of `gradients`, one for each parameter, are packed, and how they lie there."""
        return self._shard.layout, gradients


class AccumulatedGradients(Gradients):
    """Show reduced gradients, one per parameter; accumulate unreduced ones in the reduce dtype, out of sight.

    Only those of trainable parameters travel. What no rank has used stays without a gradient.

    Attributes:
        divisor: Divides sums over ranks; None is the number of ranks.
        across: Whether what ranks of the shard axis have reduced is also reduced across replicas, or waits.
    """

    def __init__(self, shard: LocalShard) -> None:
        super().__init__(shard)
        self.divisor: float | None = None
        self.across = True
        self._accumulated: Tensor | None = None
        self._carried: Tensor | None = None
        # The parameters of which gradients are packed, by index; which of them this rank has used, in what is
        # accumulated too; their layout; the marks of both.
        self._indices: tuple[int, ...] = ()
        self._used: tuple[bool, ...] = ()
        self._layout = self._rows.only(())
        self._usage = Usage.of(self._layout, (), shard.device)

    def like(self, shard: LocalShard) -> Self:
        copied = super().like(shard)
        copied.divisor, copied.across = self.divisor, self.across
        return copied

    @property
    def unreduced(self) -> bool:
        accumulated = self._accumulated is not None and not self._waits
        return accumulated or (self._carried is not None and self.across)

    def _shown(self) -> dict[nn.Parameter, Tensor]:
        found = ((param.parameter, param.gradient) for param in self._shard.params)
        return {parameter: gradient for parameter, gradient in found if gradient is not None}

    def reduce(self, full: UnshardedParams, pool: BufferPool) -> None:
        if self._waits:
            self.accumulate(full)
        else:
            super().reduce(full, pool)

    @without_grad
    def accumulate(self, full: UnshardedParams) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_accumulated(flat)
        self._accumulated = flat

    def drop_accumulated(self) -> None:
        self._accumulated = self._carried = None

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for param in self._shard.params:
            if param.parameter in gradients:
                param.set_gradient(gradients[param.parameter])

    def _add_accumulated(self, flat: Tensor) -> None:
        if self._accumulated is not None:
            flat += self._accumulated
            self._accumulated = None

    def _start(self, flat: Tensor, dtype: torch.dtype, pool: BufferPool) -> Callable[[], Tensor]:
        mesh = self._shard.config.mesh
        if self._stays_inside:
            return collectives.start_inside(flat, mesh, pool, Sum(self.divisor, usage=self._usage))
        sum_, self._carried = Sum(self.divisor, self._carried, self._usage), None
        return collectives.start_mean(flat, mesh, dtype, pool, sum_)

    @property
    def _rows(self) -> RowLayout:
        assert isinstance(self._shard.layout, RowLayout)
        return self._shard.layout

    def _message(self, gradients: Sequence[Tensor | None]) -> tuple[Layout, Sequence[Tensor | None]]:
        shard = self._shard
        # What was accumulated before its parameter was frozen is reduced, too.
        waits = () if self._accumulated is None and self._carried is None else self._indices
        indices = tuple(
            i for i, param in enumerate(shard.params) if param.parameter.requires_grad or i in waits
        )
        if indices != self._indices:
            self._change_message(indices)
        sent = [gradients[index] for index in indices]
        used = [gradient is not None for gradient in sent]
        if self._accumulated is not None:
            used = [now or before for now, before in zip(used, self._used, strict=True)]
        if tuple(used) != self._used or self._usage.used.device != shard.device:
            self._used = tuple(used)
            self._usage = Usage.of(self._layout, used, shard.device)
        return self._layout, sent

    def _change_message(self, indices: tuple[int, ...]) -> None:
        """Pack the gradients of other parameters from now on, and pack accumulated and carried ones again."""
        old, new = self._layout, self._rows.only(indices)
        starts = dict(zip(self._indices, old.shard_starts, strict=True))

        def again(packed: Tensor | None) -> Tensor | None:
            if packed is None or not packed.numel():
                return None
            rows = packed.view(-1, old.shard_numel)
            fresh = rows.new_full((len(rows), new.shard_numel), -0.0)
            for index, start, size in zip(indices, new.shard_starts, new.piece_numels, strict=True):
                if (before := starts.get(index)) is not None:
                    fresh[:, start : start + size] = rows[:, before : before + size]
            return fresh.view(-1)

        self._accumulated, self._carried = again(self._accumulated), again(self._carried)
        used = dict(zip(self._indices, self._used, strict=True))
        self._indices, self._layout = indices, new
        self._used = tuple(used.get(index, False) for index in indices)
        self._usage = Usage.of(new, self._used, self._shard.device)

    @property
    def _waits(self) -> bool:
        """Whether nothing is to be sent: replicas get nothing yet, and inside one there is one shard."""
        return not self.across and self._shard.config.mesh.replicate is not None and self._shard.whole

    @property
    def _stays_inside(self) -> bool:
        return not self.across and self._shard.config.mesh.replicate is not None and not self._shard.whole

    def _add_shard(self, reduced: Tensor) -> None:
        if self._stays_inside:
            self._carried = reduced if self._carried is None else self._carried.add_(reduced)
            return
        unused, views = self._unused(reduced), tuple(self._shard.views())
        reduced = reduced.to(self._shard.flat.device)
        for index, start in zip(self._indices, self._layout.shard_starts, strict=True):
            if index not in unused:
                param, view = views[index]
                fresh = reduced[start : start + view.numel()].view(view.shape)
                if (shown := param.gradient) is None:
                    param.set_gradient(fresh)
                else:
                    shown.add_(fresh)
                for hook in tuple((gradient_hooks(param.parameter) or {}).values()):
                    hook(param.parameter)

    def _unused(self, reduced: Tensor) -> Collection[int]:
        """Return the parameters, by index, that no rank has used; with elements, as others leave no trace."""
        if not self._usage.needed:
            return ()
        layout = self._layout
        found = iter(self._usage.piece(0, layout.shard_numel).unused(reduced).tolist())
        return {i for i, size in zip(self._indices, layout.piece_numels, strict=True) if size and next(found)}


class VisibleGradients(Gradients):
    """Make what the user sees the only store: `zero_grad`, a scaler or a clip in between is respected.

    Inside `no_sync` the visible gradients are full and unreduced; those that had been reduced before wait in
    `_synced` until the next reduction.
    """

    def __init__(self, shard: LocalShard) -> None:
        super().__init__(shard)
        self._unsynced = False
        self._synced: dict[nn.Parameter, Tensor] = {}
        self._shown_version = 0

    @property
    def unreduced(self) -> bool:
        return self._unsynced and bool(self.visible())

    def _shown(self) -> dict[nn.Parameter, Tensor]:
        return {p: p.grad for p, _ in self._spans(full=True) if p.grad is not None}

    @without_grad
    def accumulate(self, full: UnshardedParams) -> None:
        self.settle()
        flat = self._pack(full, BufferPool())
        self._add_accumulated(flat)
        self._show_full(flat)

    def drop_accumulated(self) -> None:
        """Do nothing: the user sees them all, and may keep them."""

    def presence(self) -> list[float]:
        """Return for each parameter 1.0 if this rank shows a gradient of it, else 0.0."""
        shard = self._shard
        visible = (p.parameter if shard.config.use_orig_params else shard.flat for p in shard.params)
        return [float(parameter.grad is not None) for parameter in visible]

    @without_grad
    def full(self, dtype: torch.dtype, presence: Sequence[float]) -> list[Tensor | None]:
        """Return one full gradient per parameter, in its shape and `dtype`; None where no rank has one.

        `presence`: what the ranks show, added up. Inside `no_sync` gradients are this rank's own.
        """
        flat = self.local(dtype)
        return self.views(flat if self._unsynced else self._shard.gather(flat), presence)

    @without_grad
    def local(self, dtype: torch.dtype) -> Tensor:
        """Return the visible gradients in one new 1-D tensor, which is full if they are not reduced yet."""
        shard = self._shard
        numel = shard.layout.padded_numel if self._unsynced else shard.layout.shard_numel
        flat = torch.zeros(numel, dtype=dtype, device=shard.device)
        for parameter, span in self._spans(full=self._unsynced):
            if (gradient := _dense_gradient(parameter)) is not None:
                flat[span] = gradient.reshape(-1).to(flat.device)
        return flat

    def views(self, full: Tensor, presence: Sequence[float]) -> list[Tensor | None]:
        """Return the gradients that lie in the 1-D `full`, as the method `full` does."""
        return [
            view if num else None for view, num in zip(self._shard.layout.views(full), presence, strict=True)
        ]

    @without_grad
    def write_back(self, full: Sequence[Tensor | None]) -> None:
        """Keep this rank's part of `full`, which the user made of what the method `full` had returned.

        A gradient that was dropped is dropped; one that was not there before is not kept.
        """
        shard, layout = self._shard, self._shard.layout
        for i, (param, gradient) in enumerate(zip(shard.params, full, strict=True)):
            visible = param.parameter if shard.config.use_orig_params else shard.flat
            if visible.grad is None:
                continue
            if gradient is None and shard.config.use_orig_params:
                visible.grad = None
                continue
            value = torch.zeros(param.shape) if gradient is None else gradient
            own = value.reshape(-1) if self._unsynced else layout.select(i, shard.config.mesh.index, value)
            span = shard.spans[i]
            if self._unsynced:
                span = slice(layout.starts[i], layout.starts[i] + layout.numels[i])
            kept = visible.grad if shard.config.use_orig_params else visible.grad[span]
            own = own.reshape(kept.shape).to(kept)
            # What was not touched must not look so: zeros that the user writes drop what waits behind them.
            if not torch.equal(kept, own):
                kept.copy_(own)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> Mapping[nn.Parameter, Tensor]:
        self._synced = {p: fn(gradient) for p, gradient in self._synced.items()}
        return super().convert(fn)

    def restore(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            attach_gradient(parameter, gradient)

    def _add_shard(self, reduced: Tensor) -> None:
        reduced = reduced.to(self._shard.flat.device)
        for parameter, span in self._spans(full=False):
            fresh = reduced[span].view_as(parameter)
            if (gradient := _dense_gradient(parameter)) is None:
                attach_gradient(parameter, fresh)
            else:
                gradient.add_(fresh)
            for hook in tuple((gradient_hooks(parameter) or {}).values()):
                hook(parameter)

    def _show_full(self, full: Tensor) -> None:
        self._synced, self._unsynced = self._shown(), True
        self._shown_version = full._version
        shapes = {param.parameter: param.shape for param in self._shard.params}
        for parameter, span in self._spans(full=True):
            gradient = full[span]
            attach_gradient(parameter, gradient.view(shapes.get(parameter, gradient.shape)))

    def _add_accumulated(self, full: Tensor) -> None:
        """Add visible unreduced gradients to `full` and show the reduced ones that wait behind them."""
        if not self._unsynced:
            return
        for parameter, span in self._spans(full=True):
            gradient = _dense_gradient(parameter)
            if self._was_zeroed(gradient):
                self._synced.pop(parameter, None)
            if gradient is not None:
                full[span] += gradient.reshape(-1).to(full.device)
            attach_gradient(parameter, self._synced.get(parameter))
        self._unsynced, self._synced = False, {}

    def _was_zeroed(self, shown: Tensor | None) -> bool:
        """Return whether the user zeroed a full gradient, and so means to forget what waits behind it."""
        return shown is None or (shown._version != self._shown_version and not shown.any())

    def _spans(self, full: bool) -> Iterator[tuple[nn.Parameter, slice]]:
        """Yield each visible trainable parameter with where its gradient lies in the full flat tensor.

        Without `full`: those that this rank holds a part of, with where that lies in its shard.
        """
        shard, layout = self._shard, self._shard.layout
        if shard.config.use_orig_params:
            starts = zip(layout.starts, layout.numels, strict=True)
            spans = [slice(start, start + numel) for start, numel in starts] if full else shard.spans
            for param, span in zip(shard.params, spans, strict=True):
                if param.parameter.requires_grad and (full or span.stop > span.start):
                    yield param.parameter, span
        elif shard.flat.requires_grad:
            yield shard.flat, slice(0, layout.numel if full else layout.shard_numel)


def _dense_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the visible gradient, unless it is the sparse zeros that `Arrivals` leaves of one it catches."""
    gradient = parameter.grad
    return None if gradient is None or gradient.is_sparse else gradient
