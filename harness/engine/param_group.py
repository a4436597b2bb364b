"""A group: parameters that are sharded, unsharded and reduced together. Runs on ranks.

The group does not decide when to act; `engine.unit` does. It has unsharded parameters in one kind of
`Dtypes` at a time: to unshard in others gives them up. Autograd ends with one forward before it comes to
another of the same unit, so that a backward of two forwards in different dtypes unshards for one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lockstep.engine import collectives
from lockstep.engine.api import GroupState
from lockstep.engine.gradients import Gradients
from lockstep.engine.layout import copy_in, copy_out
from lockstep.engine.marks import invalidate
from lockstep.engine.mesh import Axis
from lockstep.engine.param import LocalShard
from lockstep.engine.torch_internals import outside_transforms, without_grad
from lockstep.engine.unsharded import Dtypes, Precision, UnshardedParams, fill_with_nan

TRANSITIONS: Mapping[tuple[GroupState, str], GroupState] = {
    # in a forward, in a backward
    (GroupState.SHARDED, "unshard"): GroupState.UNSHARDED,
    (GroupState.UNSHARDED, "reshard"): GroupState.SHARDED,
    # ahead of either
    (GroupState.SHARDED, "prefetch"): GroupState.PREFETCHED,
    (GroupState.PREFETCHED, "unshard"): GroupState.UNSHARDED,
    (GroupState.PREFETCHED, "reshard"): GroupState.SHARDED,
    # from a forward to its backward
    (GroupState.UNSHARDED, "retain"): GroupState.RETAINED,
    (GroupState.RETAINED, "retain"): GroupState.RETAINED,
    (GroupState.RETAINED, "unshard"): GroupState.UNSHARDED,
    (GroupState.RETAINED, "reshard"): GroupState.SHARDED,
    # likewise
    (GroupState.UNSHARDED, "reshard_to"): GroupState.SHARDED_POST_FORWARD,
    (GroupState.SHARDED_POST_FORWARD, "prefetch"): GroupState.PREFETCHED,
    (GroupState.SHARDED_POST_FORWARD, "unshard"): GroupState.UNSHARDED,
    (GroupState.SHARDED_POST_FORWARD, "reshard"): GroupState.SHARDED,
    # between steps, for the user
    (GroupState.SHARDED, "summon"): GroupState.SUMMONED,
    (GroupState.SUMMONED, "end_summon"): GroupState.SHARDED,
}
"""The state after each verb, a method of `ParamGroup`; where a pair is not listed, the verb does nothing."""


class ParamGroup:
    """Make unsharded parameters from the local shard and give them up again.

    Attributes:
        full: The unsharded parameters that were made last, with or without memory.
        variants: Those in all dtypes that were ever needed; each is used again in its dtypes.
    """

    def __init__(self, shard: LocalShard, gradients: Gradients, precision: Precision) -> None:
        self.shard = shard
        self.gradients = gradients
        self.precision = precision
        self.config = shard.config
        self.state = GroupState.SHARDED
        self.full: UnshardedParams | None = None
        self.variants: dict[Dtypes, UnshardedParams] = {}
        # Waits for the all-gather on its way, and fills the buffer.
        self._arrive: Callable[[], object] | None = None
        # `shard.versions` when unsharded parameters were pinned.
        self._pinned: Sequence[object] | None = None
        # An optimizer stepped, in a hook of a backward, while modules saw unsharded parameters.
        self._outdated = False
        # What this rank keeps in SHARDED_POST_FORWARD, and the ranks that have all of it.
        self._part: tuple[Tensor, Axis] | None = None
        # The copy of the local shard that the last all-gather sent, if it had to be cast or moved for it.
        self._sent: Tensor | None = None

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes of a forward that would begin now."""
        return self.precision.dtypes(self.shard.flat.dtype)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The tensors that modules compute with, one per parameter; empty before the first unshard."""
        return self.full.leaves if self.full else ()

    @property
    def unsharded_bytes(self) -> int:
        full = sum(full.nbytes for full in self.variants.values())
        return full + (self._part[0].untyped_storage().nbytes() if self._part else 0)

    @property
    def low_precision_bytes(self) -> int:
        """Bytes of the copy of the shard that was cast to be sent."""
        if self._sent is None or self._sent.dtype == self.shard.flat.dtype:
            return 0
        return self._sent.untyped_storage().nbytes()

    def prefetch(self, dtypes: Dtypes | None = None) -> None:
        """Start the all-gather that `unshard` will need, if no unsharded parameters are there."""
        if after := self._after("prefetch"):
            with outside_transforms():
                self._start_all_gather(dtypes or self.dtypes)
            self.state = after

    def unshard(self, dtypes: Dtypes | None = None) -> None:
        """Show modules unsharded parameters for a forward or backward of `dtypes`; None means the current."""
        if self.state is GroupState.SUMMONED:
            raise RuntimeError(
                f"{self.config.name}: forward or backward inside summon_full_params; leave it first."
            )
        dtypes = dtypes or self.dtypes
        if self.full and self.full.dtypes != dtypes:
            self.reshard()
        if after := self._after("unshard"):
            with outside_transforms():
                if self._after("prefetch"):
                    self._start_all_gather(dtypes)
                self._finish_all_gather()
                self.shard.show_unsharded(self.leaves)
            self.state = after

    def retain(self, shown: bool = False) -> None:
        """Retain unsharded parameters for backward; show modules their shards again, unless `shown`."""
        if after := self._after("retain"):
            if not shown:
                with outside_transforms():
                    self.shard.show()
            self.state = after

    def begin_forward(self, keeps: bool) -> bool:
        """Guard what is sharded while a forward of the root goes on.

        Return True where full parameters are shown instead: always there, of a unit that `keeps` its own.
        """
        shard = self.shard
        if self.state is GroupState.SUMMONED:
            return False
        with outside_transforms():
            shard.reclaim()
            shard.guarded = True
            if self.state is GroupState.UNSHARDED:  # by the user
                return False
            if keeps and shard.whole and not shard.flat.is_meta:
                full = self.variant(self.dtypes)
                if full.borrowed:
                    self.full = full
                    shard.show_unsharded(full.leaves)
                    return True
            shard.show()
        return False

    def bring_back(self, full: UnshardedParams) -> None:
        """Show modules `full`, which a forward kept: its backward may read it before that of the unit."""
        if self.full is full and (full.borrowed or self.state is GroupState.RETAINED):
            with outside_transforms():
                self.shard.show_unsharded(full.leaves)
        elif full in self.variants.values():
            self.unshard(full.dtypes)

    def show_shards(self) -> None:
        """Show modules their shards where they are not unsharded, without stand-ins from here on."""
        self.shard.guarded = False
        if self.state not in (GroupState.UNSHARDED, GroupState.SUMMONED):
            with outside_transforms():
                self.shard.show()

    def reshard(self) -> None:
        """Show modules their shards again and give the memory of unsharded parameters back."""
        if (after := self._after("reshard")) and self.full:
            with outside_transforms():
                if self._arrive:  # wait as the other ranks do, and use nothing of it
                    self._arrive()
                    self._forget_all_gather()
                self._part = None
                self.full.free()
                self.shard.show()
            self.state = after
        self._pinned, self._outdated = None, False

    def reshard_to(self, axis: Axis) -> None:
        """Show modules their shards again, and keep this rank's part of unsharded parameters for backward.

        The ranks of `axis`, which are neighbours on the shard axis, have all of them.
        """
        if (after := self._after("reshard_to")) and self.full:
            shards = torch.empty_like(self.full.buffer)
            copy_in(self.shard.layout.views(self.full.buffer), shards, self.shard.layout)
            part = shards.view(axis.size, -1)[axis.rank].clone()
            self.reshard()
            self._part = (part, axis)
            self.state = after

    def pin(self) -> None:
        """Make unsharded parameters, there or on their way, outlast `reset` until the shard changes."""
        if self._outdated:
            self.reshard()
        self._pinned = self.shard.versions

    def invalidate(self, stepped: Collection[Tensor]) -> None:
        """Give pinned parameters up if any of `stepped` is one: the shard has changed."""
        unsharded = self.state is GroupState.UNSHARDED
        may_be_pinned = unsharded or self._pinned is not None
        if may_be_pinned and any(param.parameter in stepped for param in self.shard.params):
            if not unsharded:
                self.reshard()
            self._pinned, self._outdated = None, unsharded

    def drop_prefetched(self) -> None:
        """Give up what was prefetched and then not needed."""
        if self.state is GroupState.PREFETCHED and self._pinned is None:
            self.reshard()

    def reset(self) -> None:
        """Reshard, unless pinned, and forget gradients of a backward that did not come to an end."""
        with outside_transforms():
            if self._pinned is None or self._pinned != self.shard.versions:
                self.reshard()
            if self.gradients.started:
                self.gradients.drop_started()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that a backward computed and did not reduce, and pending ones."""
        self.gradients.arrivals.waiting.clear()
        for full in self.variants.values():
            full.forget_pending()
            for leaf in full.leaves:
                leaf.grad = None

    def gather_original(self) -> Tensor:
        """Return all parameters in one new 1-D tensor (padded numel, original dtype, group's device)."""
        return self.shard.gather(self.local_original())

    def local_original(self) -> Tensor:
        """Return this rank's flat shard (original dtype), where it rests; reshard."""
        self.reshard()
        self.shard.reclaim()
        return self.shard.flat.data

    def summon(self, full: Tensor, gradients: Sequence[Tensor | None] | None) -> None:
        """Register full original parameters that lie in `full`, with `gradients` if given."""
        if after := self._after("summon"):
            self.shard.show_original(full, gradients)
            self.state = after

    def end_summon(self, writeback: bool) -> None:
        """Show modules their shards again; with `writeback` keep what this rank owns of the values."""
        if after := self._after("end_summon"):
            try:
                if writeback:
                    self.shard.write_back()
            finally:
                self.shard.show()
                self.state = after

    def hide(self) -> None:
        """Remove the parameters from their modules until `convert`."""
        if self.state in (GroupState.UNSHARDED, GroupState.SUMMONED):
            raise RuntimeError(
                f"{self.config.name}: cannot convert while {self.state.name.lower()}; "
                "convert between steps, outside forward, backward and summon_full_params."
            )
        self.reset()
        self.shard.reclaim()
        self.shard.hide()

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply `fn` (a cast or a move) to the shard and its gradients, as `nn.Module.to` would."""
        self.gradients.arrivals.unwatch()
        converted = self.gradients.convert(fn)
        self.full, self.variants = None, {}
        self.shard.replace(fn(self.shard.flat.data))
        self.gradients.restore(converted)

    def variant(self, dtypes: Dtypes) -> UnshardedParams:
        """Return the unsharded parameters in `dtypes`: new ones, without memory, if the shard is new."""
        shard, flat = self.shard, self.shard.flat.data
        device = shard.device
        borrowed = shard.whole and (dtypes.compute, device) == (flat.dtype, flat.device)
        full = self.variants.get(dtypes)
        unchanged = full is not None and (full.borrowed, full.buffer.device) == (borrowed, device)
        if full and unchanged and (not borrowed or full.buffer.data_ptr() == flat.data_ptr()):
            return full
        buffer = flat
        if not borrowed:
            with torch.inference_mode(False):  # as the leaves
                buffer = torch.empty(shard.layout.padded_numel, dtype=dtypes.compute, device=device)
        leaves = shard.leaves_in(buffer)
        if self.config.dtensor:
            invalidate(leaves, f"unsharded parameters of {self.config.name}")
        full = UnshardedParams(buffer, leaves, dtypes, borrowed, self.config.poison)
        self.variants[dtypes] = full
        full.free()
        return full

    def _after(self, verb: str) -> GroupState | None:
        return TRANSITIONS.get((self.state, verb))

    @without_grad
    def _start_all_gather(self, dtypes: Dtypes) -> None:
        shard = self.shard
        shard.reclaim()
        flat = shard.flat.data
        if flat.is_meta:
            raise RuntimeError(
                f"{self.config.name}: parameters are on the meta device; call to_empty(device=...) on the "
                "model and give them values first."
            )
        full = self.full = self.variant(dtypes)
        if full.borrowed or shard.layout.in_order:
            full.allocate()
        axis = self.config.mesh.shard
        if axis is None:  # nothing is sent, and copying casts
            if not full.borrowed:
                full.buffer.copy_(flat)
            return
        if self._part:
            local, axis = self._part
        else:
            local = flat
            if (flat.dtype, flat.device) != (dtypes.compute, full.buffer.device):
                local = collectives.as_sent(flat, dtypes.compute, full.buffer.device, axis)
            self._sent = local if local.data_ptr() != flat.data_ptr() else None
        if shard.layout.in_order:
            self._arrive = collectives.start_gather(full.buffer, local, axis)
        else:
            # The buffer is filled parameter by parameter when all shards have come, so it is allocated then:
            # a prefetched group holds the shards alone.
            self._arrive = collectives.start_exchange(local, axis, partial(self._copy_out, full))

    def _copy_out(self, full: UnshardedParams, arrived: Sequence[Tensor]) -> None:
        full.allocate()
        numel = self.shard.layout.shard_numel
        copy_out([part.view(-1, numel) for part in arrived], full.buffer, self.shard.layout)

    @without_grad
    def _finish_all_gather(self) -> None:
        if self._arrive and self.full:
            self._arrive()
            self._forget_all_gather()

    def _forget_all_gather(self) -> None:
        self._arrive = self._part = None
        # Its memory and not the tensor: a thread of the backend may hold that longer than needed. What others
        # read in place cannot be resized, and is theirs until they have.
        if self._sent is not None and self._sent.untyped_storage().resizable():
            if self.config.poison:
                fill_with_nan(self._sent)
            self._sent.untyped_storage().resize_(0)
        self._sent = None
