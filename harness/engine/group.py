"""A group: parameters that are sharded, gathered, freed and reduced together. Runs on ranks.

    SHARDED --gather--> GATHERED --free--> SHARDED                        in a forward, in a backward
    SHARDED --prefetch--> PREFETCHED --gather--> GATHERED                 ahead of either
                        GATHERED --keep--> KEPT --gather--> GATHERED      from a forward to its backward
                        GATHERED --split--> SPLIT --gather--> GATHERED    likewise
    SHARDED --summon--> SUMMONED --dismiss--> SHARDED                     between steps, for the user

The group does not know when to act; `engine.hooks` does.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine import collectives
from harness.engine.axes import Axes
from harness.engine.full import FullParameters, fill_with_nan, lay_out
from harness.engine.functional import outside_transforms
from harness.engine.gradients import Gradients
from harness.engine.parameters import attach_gradient
from harness.engine.policy import GroupState
from harness.engine.shard import LocalShard
from harness.engine.wire import pack, unpack

_CUT = (GroupState.SHARDED, GroupState.SPLIT)
_FULL = (GroupState.PREFETCHED, GroupState.GATHERED, GroupState.KEPT, GroupState.SPLIT)


class ShardGroup:
    """Make full parameters from the local shard and give them up again."""

    def __init__(self, shard: LocalShard, gradients: Gradients) -> None:
        self.shard = shard
        self.gradients = gradients
        self.settings = shard.settings
        self.state = GroupState.SHARDED
        self._full: FullParameters | None = None
        self._arrive: Callable[[], Tensor] | None = None
        self._lasts: Sequence[object] | None = None
        self._part: Tensor | None = None
        self._among: Axes = self.settings.axes
        """Over which ranks what is gathered lies: those of the shard axis, or of `split`."""
        self._sent: Tensor | None = None
        """The copy of the local shard that the last gather sent, if it had to be cast or moved for it."""

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The full parameters that modules compute with, one per entry; empty before the first gather."""
        return self._full.leaves if self._full else ()

    @property
    def gathered_bytes(self) -> int:
        if self._full is None or self.state not in _FULL:
            return 0
        return self._full.buffer.untyped_storage().nbytes() if self._part is None else self._part.nbytes

    @property
    def low_precision_bytes(self) -> int:
        """What the copy of the shard occupies that was cast to be sent."""
        if self._sent is None or self._sent.dtype == self.shard.original_dtype:
            return 0
        return self._sent.untyped_storage().nbytes()

    @property
    def all_trainable(self) -> bool:
        return all(map(self.shard.is_trainable, self.shard.entries))

    @outside_transforms
    def prefetch(self) -> None:
        """Start what `gather` will need, if nothing of it is there."""
        if self.state in _CUT:
            self._start_gather()
            self.state = GroupState.PREFETCHED

    @outside_transforms
    def gather(self) -> None:
        """Let modules compute with full parameters in the compute dtype."""
        if self.state is GroupState.GATHERED:
            return
        if self.state is GroupState.SUMMONED:
            raise RuntimeError(
                f"{self.settings.unit}: forward or backward inside summon_full_params; leave it first."
            )
        if self.state in _CUT:
            self._start_gather()
        self._finish_gather()
        for entry, leaf in zip(self.shard.entries, self.leaves, strict=True):
            if leaf.requires_grad != (trainable := self.shard.is_trainable(entry)):
                leaf.requires_grad_(trainable)
            entry.put(leaf)
        self.state = GroupState.GATHERED

    @outside_transforms
    def keep(self, lastingly: bool = False) -> None:
        """Show modules their shards again, but keep the full parameters for backward.

        ``lastingly``: `discard` leaves them too, as long as nobody changes the shard.
        """
        if self.state is GroupState.GATHERED:
            self.shard.show()
            self.state = GroupState.KEPT
        if lastingly:
            self.last()

    @outside_transforms
    def split(self, among: dist.ProcessGroup) -> None:
        """Show modules their shards again, and keep this rank's part of the full parameters for backward.

        The ranks of ``among``, which are consecutive in the shard axis, have all of them.
        """
        if self.state is not GroupState.GATHERED or self._full is None:
            return
        whole = self._new_full()
        with torch.no_grad():
            pack(self.leaves, whole, self.shard.layout)
        part = whole.view(dist.get_world_size(among), -1)[dist.get_rank(among)].clone()
        self.free()
        self._part, self._among = part, Axes(among, None)
        self.state = GroupState.SPLIT

    @property
    def lasts(self) -> bool:
        return self._lasts is not None

    def last(self) -> None:
        """Let full parameters, there or on their way, outlast `discard` until somebody changes the shard."""
        self._lasts = self.shard.versions

    @outside_transforms
    def free(self) -> None:
        """Show modules their shards again and give the full parameters' memory back."""
        if self._full and self.state in _FULL:
            self._await_gather()
            self._full.free()
            self._part = None
            self.shard.show()
            self.state = GroupState.SHARDED
        self._lasts = None

    @outside_transforms
    def discard(self) -> None:
        """Free, and forget gradients that a backward did not come to show."""
        if self._lasts is None or self._lasts != self.shard.versions:
            self.free()
        self.gradients.drop_started()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that a backward computed but did not come to reduce."""
        for leaf in self.leaves:
            leaf.grad = None

    def full_original(self) -> Tensor:
        """Return all parameters in one new 1-D tensor (padded numel, original dtype, group's device)."""
        self.free()
        self.shard.reclaim()
        return self.shard.gather(self.shard.flat.data)

    def summon(self, full: Tensor, gradients: Sequence[Tensor | None] | None) -> None:
        """Register full original parameters that lie in ``full``, with ``gradients`` if given."""
        self.shard.hide()
        for i, (entry, view) in enumerate(zip(self.shard.entries, self.shard.in_full(full), strict=True)):
            summoned = nn.Parameter(view, requires_grad=self.shard.is_trainable(entry))
            attach_gradient(summoned, gradients[i] if gradients else None)
            entry.put(summoned)
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
        if self.state not in (GroupState.SHARDED, GroupState.KEPT, GroupState.PREFETCHED):
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
        self._full = None
        self.shard.replace(fn(self.shard.flat.data))
        self.gradients.restore(converted)

    def _full_parameters(self) -> FullParameters:
        """Return full parameters for the dtype and device of now; make them anew when these changed."""
        shard, full = self.shard, self._full
        flat = shard.flat.data
        wanted = (shard.compute_dtype, shard.device)
        borrowed = shard.whole and wanted == (flat.dtype, flat.device)
        unchanged = full is not None and (full.buffer.dtype, full.buffer.device) == wanted
        if full and unchanged and (not borrowed or full.buffer.data_ptr() == flat.data_ptr()):
            return full
        with torch.inference_mode(False):  # see full.over
            buffer = flat if borrowed else self._new_full()
        trainable = map(shard.is_trainable, shard.entries) if self.settings.registers_full else None
        leaves = lay_out(buffer, shard.layout, trainable)
        return FullParameters(buffer, leaves, borrowed, self.settings.poison)

    def _new_full(self) -> Tensor:
        shard = self.shard
        return torch.empty(shard.layout.padded_numel, dtype=shard.compute_dtype, device=shard.device)

    @torch.no_grad()
    def _start_gather(self) -> None:
        """Begin to fill full parameters; `_finish_gather` waits until they are there."""
        self.shard.reclaim()
        if self.shard.flat.is_meta:
            raise RuntimeError(
                f"{self.settings.unit}: parameters are on the meta device; call to_empty(device=...) on the "
                "model and give them values first."
            )
        self._full = self._full_parameters()
        if self._full.borrowed:
            return
        flat = self.shard.flat.data
        if self.shard.whole:  # nothing is sent, and copying casts
            self._full.allocate()
            self._full.buffer.copy_(flat)
            return
        local = self._part
        if local is None:
            local = flat.to(device=self.shard.device, dtype=self.shard.compute_dtype)
            self._sent = local if local.data_ptr() != flat.data_ptr() else None
        if self.shard.layout.in_order:
            self._full.allocate()
        wire = self._full.buffer if self.shard.layout.in_order else self._new_full()
        self._arrive = collectives.start_gather(
            wire, local, self._among if self._part is not None else self.settings.axes
        )

    @torch.no_grad()
    def _finish_gather(self) -> None:
        arrived = self._await_gather()
        if arrived is not None and self._full and arrived is not self._full.buffer:
            self._full.allocate()
            unpack(arrived, self._full.buffer, self.shard.layout)

    def _await_gather(self) -> Tensor | None:
        """Return the shards end to end, if a gather was on its way."""
        if self._arrive is None:
            return None
        arrived = self._arrive()
        self._arrive = self._part = None
        self._release_sent()
        return arrived

    def _release_sent(self) -> None:
        if self._sent is None:
            return
        if self.settings.poison:
            fill_with_nan(self._sent)
        # A thread of the backend may hold the tensor a moment longer than the gather takes.
        self._sent.untyped_storage().resize_(0)
