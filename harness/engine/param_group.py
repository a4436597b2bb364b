"""A group: parameters that are sharded, gathered, freed and reduced together. Runs on ranks.

    SHARDED --gather--> UNSHARDED --free--> SHARDED                        in a forward, in a backward
    SHARDED --prefetch--> PREFETCHED --gather--> UNSHARDED                 ahead of either
                        UNSHARDED --keep--> RETAINED --gather--> UNSHARDED      from a forward to its backward
                        UNSHARDED --split--> SHARDED_POST_FORWARD --gather--> UNSHARDED    likewise
    SHARDED --summon--> SUMMONED --dismiss--> SHARDED                     between steps, for the user

The group does not know when to act; `engine.unit` does. It has full parameters of one kind of `Dtypes` at a
time: to gather others gives them up. Autograd ends with one forward before it comes to another of the same
unit, so that a backward of two forwards in different dtypes gathers for one after the other.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.api import GroupState
from harness.engine.config import Dtypes
from harness.engine.gradients import Gradients
from harness.engine.layout import copy_in, copy_out
from harness.engine.local_shard import LocalShard
from harness.engine.mesh import MeshInfo
from harness.engine.param import attach_gradient, invalidate
from harness.engine.unsharded import UnshardedParams, fill_with_nan, lay_out, outside_transforms

_CUT = (GroupState.SHARDED, GroupState.SHARDED_POST_FORWARD)
_FULL = (GroupState.PREFETCHED, GroupState.UNSHARDED, GroupState.RETAINED, GroupState.SHARDED_POST_FORWARD)


class ParamGroup:
    """Make full parameters from the local shard and give them up again."""

    def __init__(self, shard: LocalShard, gradients: Gradients) -> None:
        self.shard = shard
        self.gradients = gradients
        self.settings = shard.settings
        self.state = GroupState.SHARDED
        self.full: UnshardedParams | None = None
        """What was gathered last."""
        self._variants: dict[Dtypes, UnshardedParams] = {}
        self._arrive: Callable[[], Tensor | tuple[Tensor, ...]] | None = None
        """Waits for a gather; a tuple is what has to be unpacked."""
        self._lasts: Sequence[object] | None = None
        """What `shard.versions` were when full parameters were told to outlast `discard`."""
        self._part: tuple[Tensor, MeshInfo] | None = None
        """This rank's part of full parameters that are split, and the ranks that have all of them."""
        self._sent: Tensor | None = None
        """The copy of the local shard that the last gather sent, if it had to be cast or moved for it."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The full parameters that modules compute with, one per param; empty before the first gather."""
        return self.full.leaves if self.full else ()

    @property
    def variants(self) -> tuple[UnshardedParams, ...]:
        """All full parameters that were ever gathered, and are computed with again when their dtypes hold."""
        return tuple(self._variants.values())

    @property
    def gathered_bytes(self) -> int:
        return sum(full.nbytes for full in self.variants) + (self._part[0].nbytes if self._part else 0)

    @property
    def low_precision_bytes(self) -> int:
        """What the copy of the shard occupies that was cast to be sent."""
        if self._sent is None or self._sent.dtype == self.shard.original_dtype:
            return 0
        return self._sent.untyped_storage().nbytes()

    @property
    def all_trainable(self) -> bool:
        return all(map(self.shard.is_trainable, self.shard.params))

    @outside_transforms
    def prefetch(self, dtypes: Dtypes | None = None) -> None:
        """Start what `gather` will need, if nothing is there."""
        if self.state in _CUT:
            self._start_gather(dtypes or self.shard.dtypes)
            self.state = GroupState.PREFETCHED

    @outside_transforms
    def gather(self, dtypes: Dtypes | None = None) -> None:
        """Let modules compute with full parameters for a forward or backward of ``dtypes``; None: of now."""
        if self.state is GroupState.SUMMONED:
            raise RuntimeError(
                f"{self.settings.unit}: forward or backward inside summon_full_params; leave it first."
            )
        dtypes = dtypes or self.shard.dtypes
        if self.full and self.full.dtypes != dtypes:
            self.free()
        if self.state is GroupState.UNSHARDED:
            return
        if self.state in _CUT:
            self._start_gather(dtypes)
        self._finish_gather()
        for param, leaf in zip(self.shard.params, self.leaves, strict=True):
            if leaf.requires_grad != (trainable := self.shard.is_trainable(param)):
                leaf.requires_grad_(trainable)
            param.put(leaf)
        self.state = GroupState.UNSHARDED

    @outside_transforms
    def keep(self) -> None:
        """Show modules their shards again, but keep the full parameters for backward."""
        if self.state is GroupState.UNSHARDED:
            self.shard.show()
            self.state = GroupState.RETAINED

    def last(self) -> None:
        """Let full parameters, there or on their way, outlast `discard` until somebody changes the shard."""
        self._lasts = self.shard.versions

    @outside_transforms
    def split(self, among: dist.ProcessGroup) -> None:
        """Show modules their shards again, and keep this rank's part of the full parameters for backward.

        The ranks of ``among``, which are neighbours on the shard axis, have all of them.
        """
        if self.state is GroupState.UNSHARDED and self.full:
            shards = torch.empty_like(self.full.buffer)
            with torch.no_grad():
                copy_in(self.leaves, shards, self.shard.layout)
            part = shards.view(dist.get_world_size(among), -1)[dist.get_rank(among)].clone()
            self.free()
            self._part = (part, MeshInfo(among, None))
            self.state = GroupState.SHARDED_POST_FORWARD

    def outdate(self) -> None:
        """Let full parameters that were to last be given up: somebody has changed the shard."""
        if self._lasts is not None and self.state is not GroupState.UNSHARDED:
            self.free()
        self._lasts = None

    @outside_transforms
    def free(self) -> None:
        """Show modules their shards again and give the full parameters' memory back."""
        if self.full and self.state in _FULL:
            self._drop_gather()
            self._part = None
            self.full.free()
            self.shard.show()
            self.state = GroupState.SHARDED
        self._lasts = None

    def drop_prefetched(self) -> None:
        """Free what was gathered ahead and then did not come to use."""
        if self.state is GroupState.PREFETCHED and self._lasts is None:
            self.free()

    @outside_transforms
    def discard(self) -> None:
        """Free, and forget gradients that a backward did not come to show."""
        if self._lasts is None or self._lasts != self.shard.versions:
            self.free()
        self.gradients.drop_started()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that a backward computed but did not come to reduce."""
        for full in self.variants:
            for leaf in full.leaves:
                leaf.grad = None

    def full_original(self) -> Tensor:
        """Return all parameters in one new 1-D tensor (padded numel, original dtype, group's device)."""
        self.free()
        self.shard.reclaim()
        return self.shard.gather(self.shard.flat.data)

    def summon(self, full: Tensor, gradients: Sequence[Tensor | None] | None) -> None:
        """Register full original parameters that lie in ``full``, with ``gradients`` if given."""
        self.shard.hide()
        for i, (param, view) in enumerate(zip(self.shard.params, self.shard.in_full(full), strict=True)):
            summoned = nn.Parameter(view, requires_grad=self.shard.is_trainable(param))
            attach_gradient(summoned, gradients[i] if gradients else None)
            param.put(summoned)
        self.state = GroupState.SUMMONED

    def dismiss(self, writeback: bool) -> None:
        """End ``summon``; with ``writeback`` keep what this rank owns of the parameters' values."""
        try:
            if writeback:
                self.shard.write_back()
        finally:
            self.shard.show()
            self.state = GroupState.SHARDED

    def hide(self) -> None:
        """Take the parameters out of their modules until ``convert``."""
        if self.state in (GroupState.UNSHARDED, GroupState.SUMMONED):
            raise RuntimeError(
                f"{self.settings.unit}: cannot convert while {self.state.name.lower()}; "
                "convert between steps, outside forward, backward and summon_full_params."
            )
        self.discard()
        self.shard.reclaim()
        self.shard.hide()

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply ``fn`` (a cast or a move) to the shard and its gradients, as ``nn.Module.to`` would."""
        converted = self.gradients.convert(fn)
        self.full, self._variants = None, {}
        self.shard.replace(fn(self.shard.flat.data))
        self.gradients.restore(converted)

    def variant(self, dtypes: Dtypes) -> UnshardedParams:
        """Return full parameters for ``dtypes``; made anew, without memory, if the shard was exchanged."""
        shard, flat = self.shard, self.shard.flat.data
        borrowed = shard.whole and (dtypes.compute, shard.device) == (flat.dtype, flat.device)
        full = self._variants.get(dtypes)
        unchanged = full is not None and (full.borrowed, full.buffer.device) == (borrowed, shard.device)
        if full and unchanged and (not borrowed or full.buffer.data_ptr() == flat.data_ptr()):
            return full
        with torch.inference_mode(False):  # see full.lay_out
            buffer = flat if borrowed else self._empty(dtypes)
        trainable = map(shard.is_trainable, shard.params) if self.settings.registers_full else None
        leaves = lay_out(buffer, shard.layout, trainable)
        if trainable:
            invalidate(leaves, f"full parameters of {self.settings.unit}")
        full = self._variants[dtypes] = UnshardedParams(
            buffer, leaves, dtypes, borrowed, self.settings.poison
        )
        full.free()
        return full

    def _empty(self, dtypes: Dtypes) -> Tensor:
        """Return memory for full parameters."""
        shard = self.shard
        return torch.empty(shard.layout.padded_numel, dtype=dtypes.compute, device=shard.device)

    @torch.no_grad()
    def _start_gather(self, dtypes: Dtypes) -> None:
        """Begin to bring shards together; `_finish_gather` waits until full parameters are there."""
        self.shard.reclaim()
        self._refuse_meta()
        full = self.full = self.variant(dtypes)
        if full.borrowed or self.shard.layout.in_order:
            full.allocate()
        if full.borrowed:
            return
        flat = self.shard.flat.data
        if self.shard.whole:  # nothing is sent, and copying casts
            full.buffer.copy_(flat)
            return
        if self._part:
            local, axes = self._part
        else:
            local, axes = flat.to(device=self.shard.device, dtype=dtypes.compute), self.settings.axes
            self._sent = local if local.data_ptr() != flat.data_ptr() else None
        if self.shard.layout.in_order:
            self._arrive = collectives.start_gather(full.buffer, local, axes)
        else:
            self._arrive = collectives.start_exchange(local, axes)

    @torch.no_grad()
    def _finish_gather(self) -> None:
        if self._arrive and self.full:
            arrived = self._arrive()
            if isinstance(arrived, tuple):
                self.full.allocate()
                numel = self.shard.layout.shard_numel
                shards = [shard for part in arrived for shard in part.view(-1, numel).unbind()]
                copy_out(shards, self.full.buffer, self.shard.layout)
            self._forget_gather()

    def _drop_gather(self) -> None:
        """Wait for a gather that is on its way, and use nothing of it."""
        if self._arrive:
            self._arrive()
            self._forget_gather()

    def _forget_gather(self) -> None:
        self._arrive = self._part = None
        self._release_sent()

    def _refuse_meta(self) -> None:
        if self.shard.flat.is_meta:
            raise RuntimeError(
                f"{self.settings.unit}: parameters are on the meta device; call to_empty(device=...) on the "
                "model and give them values first."
            )

    def _release_sent(self) -> None:
        if self._sent is None:
            return
        if self.settings.poison:
            fill_with_nan(self._sent)
        # A thread of the backend may hold the tensor a moment longer than the gather takes.
        self._sent.untyped_storage().resize_(0)
