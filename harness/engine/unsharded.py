"""The unsharded parameters of one group in one set of dtypes, and their pending gradients. Runs on ranks.

One buffer, and a leaf tensor per parameter that lies in it. The leaves live as long as the group, so that
what autograd saved in forward is valid in backward: only the memory under them comes and goes. To read a leaf
whose memory is gone crashes the process, as with torch's own engines; with LOCKSTEP_ENGINE_DEBUG=1 it reads
NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from lockstep.engine.api import MixedPrecision
from lockstep.engine.torch_internals import outside_transforms, will_run


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a forward and of the backward that belongs to it.

    Attributes:
        compute: Of unsharded parameters and their all-gather.
        reduce: Of gradients as they are sent.
        gradient: Of reduced gradients as the user gets them.
    """

    compute: torch.dtype
    reduce: torch.dtype
    gradient: torch.dtype


@dataclass(frozen=True)
class Precision:
    """The mixed precision of a unit, `given` by the user; full precision in eval of `module` if so wanted."""

    given: MixedPrecision
    module: nn.Module
    full_in_eval: bool

    @property
    def is_suspended(self) -> bool:
        """Whether the unit is in eval and therefore in full precision."""
        return self.full_in_eval and not self.module.training

    @property
    def now(self) -> MixedPrecision:
        return MixedPrecision() if self.is_suspended else self.given

    def dtypes(self, original: torch.dtype) -> Dtypes:
        """Return the dtypes of a forward that would begin now, for parameters of the dtype `original`."""
        mixed = self.now
        compute = mixed.param_dtype or original
        reduce = mixed.reduce_dtype or compute
        return Dtypes(compute, reduce, gradient=reduce if mixed.keep_low_precision_grads else original)


@dataclass(eq=False)
class UnshardedParams:
    """A 1-D `buffer` of the layout's padded size and `leaves`, one per parameter in its own shape.

    Attributes:
        dtypes: Of the forwards that compute with them, and of their backwards.
        borrowed: The buffer is the shard's own storage, as nothing is sharded or cast, and is never freed.
        poison: Instead of giving memory back, fill it with NaN, so that a late reader shows.
        inputs_done: Gradients came out at the unit's arguments: nothing reads the parameters any more.
    """

    # Not shown: a traceback shows what functions were given, and may find the memory gone.
    buffer: Tensor = field(repr=False)
    leaves: tuple[Tensor, ...] = field(repr=False)
    dtypes: Dtypes
    borrowed: bool
    poison: bool
    inputs_done: bool = field(default=False, init=False)
    _in_use: bool = field(default=False, init=False)
    _in_backward: set[object] = field(default_factory=set, init=False)
    _nodes: dict[Tensor, Node] = field(default_factory=dict, init=False, repr=False)
    _pending: dict[int, int] = field(default_factory=dict, init=False)

    @property
    def nbytes(self) -> int:
        """Allocated bytes; where memory is never given back, those that modules or a backward still need."""
        stays = self.borrowed or self.poison
        return 0 if stays and not self._in_use else self.buffer.untyped_storage().nbytes()

    def allocate(self) -> None:
        self._in_use = True
        storage = self.buffer.untyped_storage()
        if not self.borrowed and storage.nbytes() == 0:
            storage.resize_(self.buffer.numel() * self.buffer.itemsize)

    def free(self) -> None:
        self._in_use = False
        if self.borrowed:
            return
        if self.poison:
            fill_with_nan(self.buffer)
        else:
            self.buffer.untyped_storage().resize_(0)

    def watch(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with each gradient that comes to a leaf from now on, of those that can have one."""
        for leaf in self.leaves:
            if leaf.requires_grad and leaf not in self._nodes:
                with outside_transforms():
                    self._nodes[leaf] = get_gradient_edge(leaf).node
                    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_backward(self, call: object) -> None:
        """Record that the backward of this forward call begins."""
        self._in_backward.add(call)
        self.inputs_done = False

    def end_inputs(self, call: object) -> None:
        """Record that gradients came out at the arguments of this forward call."""
        # They may be the outputs of an earlier call of the same unit, whose backward has begun by then.
        self._in_backward.discard(call)
        self.inputs_done = not self._in_backward

    def count_gradient(self, backward: int) -> bool:
        """Count one gradient of the running `backward`, and return whether it was the last pending one."""
        # As `register_multi_grad_hook` counts; but that one holds all gradients until the last has come,
        # which makes autograd copy each of them.
        self._pending[backward] = self.pending(backward) - 1
        return self._pending[backward] == 0

    def pending(self, backward: int) -> int:
        """Return how many leaves the running `backward` will still give a gradient to."""
        if backward not in self._pending:
            return sum(map(will_run, self._nodes.values()))
        return self._pending[backward]

    def forget_pending(self) -> None:
        """Forget the backwards that were under way."""
        self._pending.clear()
        self._in_backward.clear()


def fill_with_nan(tensor: Tensor) -> None:
    tensor.data.fill_(float("nan"))
