"""What the units below one root share: whether a step is going on, gathers ahead, the reduction under way.

Runs on ranks. `engine.unit` has the units, which call in here; the end of a backward is seen here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from harness.engine.api import BackwardPrefetch
from harness.engine.collectives import BufferPool
from harness.engine.config import Dtypes
from harness.engine.mesh import neighbours
from harness.engine.param_group import ParamGroup
from harness.engine.unsharded import UnshardedParams

_Expected = tuple[ParamGroup, Dtypes | None]
"""A group, and for backward the dtypes of the forward that it belongs to; None means those of the time."""


class Prefetcher:
    """Start gathers ahead of the units of one root: one at a time, so that two are in flight at most.

    A forward is expected to run units in the order of the forward before, a backward in the reverse of the
    order in which they ended their last forward. All ranks run the same units, so all guess the same. A guess
    that is wrong gathers something that is freed unused at the end of the forward or backward.
    """

    def __init__(self, forward: bool, backward: BackwardPrefetch | None) -> None:
        self._forward = forward
        self._backward = backward
        self._entered: list[_Expected] = []
        self._ended: list[_Expected] = []
        self._expected: list[_Expected] = []
        self._position = 0
        """How far the current forward or backward has come in ``_expected``."""

    def begin_forward(self) -> None:
        self._expected, self._position = self._entered, 0
        self._entered, self._ended = [], []

    def in_forward(self, group: ParamGroup, told: Sequence[ParamGroup] = ()) -> None:
        """Gather what is ``told``, or guess, as ``group``, on its own way already, begins its forward."""
        self._entered.append((group, None))
        expected = self._advance(group)
        if told:
            _prefetch(told)
        elif expected and self._forward:
            self._prefetch_next()

    def after_forward(self, group: ParamGroup) -> None:
        """``group`` ended a forward that a backward can come to."""
        self._ended.append((group, group.full.dtypes if group.full else None))

    def begin_backward(self) -> None:
        self._expected, self._position = self._ended[::-1], 0

    def before_gradients(self, group: ParamGroup, told: Sequence[ParamGroup] = ()) -> None:
        """Do the same as backward comes to ``group``, before it computes gradients."""
        expected = self._advance(group)
        if told:
            _prefetch(told)
        elif expected and self._backward is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_next()

    def after_gradients(self) -> None:
        """The gradients of the group that backward came to last are there."""
        if self._backward is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_next()

    def _advance(self, group: ParamGroup) -> bool:
        """Go past ``group``; tell whether it was expected at all."""
        for position in range(self._position, len(self._expected)):
            if self._expected[position][0] is group:
                self._position = position + 1
                return True
        return False

    def _prefetch_next(self) -> None:
        if self._position < len(self._expected):
            group, dtypes = self._expected[self._position]
            group.prefetch(dtypes)


def _prefetch(groups: Sequence[ParamGroup]) -> None:
    for group in groups:
        group.prefetch()


if TYPE_CHECKING:
    from harness.engine.unit import Unit


class RootState:
    """What the units below one root share."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        asked = self.root.settings
        self.prefetcher = Prefetcher(asked.forward_prefetch, asked.backward_prefetch)
        self._pool = BufferPool()
        self._neighbours: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._reducing: ParamGroup | None = None
        self._forwards = 0
        self.backward = -1
        """The outermost backward that goes through the tree, as `backward_id` numbers it; -1 for none."""

    @property
    def root(self) -> Unit:
        return self.units[0]

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of any unit is going on."""
        return self._forwards > 0 or self.in_backward

    @property
    def in_backward(self) -> bool:
        # A device's thread may let go of a backward that raised a little late.
        return self.backward != -1 and backward_id() != -1

    def enter_forward(self) -> None:
        if self._forwards == 0 and not self.in_backward:
            # Kept parameters may be stale, and a step that raised may have left things behind.
            self.backward = -1
            for unit in self.units:
                unit.start()
            self.prefetcher.begin_forward()
        self._forwards += 1

    def leave_forward(self, failed: bool) -> None:
        """After a failure nothing more is awaited: who knows whether the other ranks came as far."""
        self._forwards -= 1
        if self._forwards == 0 and not self.in_backward:
            for unit in self.units:
                unit.end_forward(failed)

    def outdate(self, stepped: Collection[Tensor]) -> None:
        """Gather groups that hold any of ``stepped`` anew for the next forward, whatever was kept for it."""
        for unit in self.units:
            if unit.group and any(param.parameter in stepped for param in unit.group.shard.params):
                unit.group.outdate()

    def neighbours(self, group: ParamGroup, count: int) -> dist.ProcessGroup:
        """Return the process group of the ``count`` ranks that split the parameters of ``group``."""
        ranks = neighbours(group.settings.axes, count)
        if ranks not in self._neighbours:
            # Only the members make it: other replicas may not be here now.
            self._neighbours[ranks] = dist.new_group(ranks, use_local_synchronization=True)
        return self._neighbours[ranks]

    def collect(self, group: ParamGroup, full: UnshardedParams, sync: bool) -> None:
        """Take the gradients that ``full`` of ``group`` has; with ``sync`` start to average them.

        One group is on its way at a time, while the gradients of the next are computed.
        """
        if not sync:
            group.gradients.collect_unsynced(full)
            return
        self._settle()
        group.gradients.collect(full, self._pool)
        self._reducing = group

    def enter_backward(self) -> None:
        """Make sure that the end of this backward is seen, once, in the outermost backward."""
        if self.backward == -1:
            self.backward = backward_id()
            self._drop_reduction()
            self.prefetcher.begin_backward()
            for unit in self.units:
                unit.prepare_buffers()  # a forward in another mode may have come between
            end = partial(self._end_backward)
            # Autograd alone holds it, and lets go of it without a call after an exception.
            finalize(end, self._abort_backward, self.backward).atexit = False
            Variable._execution_engine.queue_callback(end)

    def _end_backward(self) -> None:
        self.backward = -1
        for unit in self.units:
            unit.finish()
        self._settle()
        self._pool.clear()

    def _abort_backward(self, backward: int) -> None:
        """Go back to between steps if ``backward`` has not ended well; as after a forward, await nothing."""
        if self.backward == backward:
            self.backward = -1
            for unit in self.units:
                unit.abort_backward()

    def _drop_reduction(self) -> None:
        """Forget what a backward that raised had begun to reduce."""
        if self._reducing:
            self._reducing.gradients.drop_started()
            self._reducing = None

    def _settle(self) -> None:
        if self._reducing:
            self._reducing.gradients.settle()
            self._reducing = None


def backward_id() -> int:
    """Return the number of the backward that this thread is in, -1 outside. Nested ones differ."""
    return torch._C._current_graph_task_id()
