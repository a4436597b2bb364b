"""The state that the units below one root share: the step under way, prefetches, a reduction. Runs on ranks.

`engine.unit` has the units, which call in here; the end of a backward is seen here.
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

from lockstep.engine.api import BackwardPrefetch
from lockstep.engine.collectives import BufferPool
from lockstep.engine.mesh import Axis
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.torch_internals import AUTOGRAD_ENGINE, current_backward, untraced
from lockstep.engine.unsharded import Dtypes, UnshardedParams

if TYPE_CHECKING:
    from lockstep.engine.unit import Unit

_Expected = tuple[ParamGroup, Dtypes | None]
"""A group, and for backward the dtypes of the forward that it belongs to; None means the current ones."""

Kept = Sequence[tuple[ParamGroup, UnshardedParams]]
"""Parameters that units kept unsharded after their forward, until the root's: other modules may read them."""


class Prefetcher:
    """Start all-gathers ahead of the units of one root: one at a time, so that two are in flight at most.

    A forward is expected to run units in the order of the forward before, a backward in the reverse of the
    order in which they ended their last forward. All ranks run the same units, so all guess the same. A guess
    that is wrong gathers something that is resharded unused at the end of the forward or backward.
    """

    def __init__(self, forward: bool, backward: BackwardPrefetch | None) -> None:
        self._forward = forward
        self._backward = backward
        self._entered: list[_Expected] = []
        self._ended: list[_Expected] = []
        self._expected: list[_Expected] = []
        # How far the current forward or backward has come in `_expected`.
        self._position = 0

    def begin_forward(self) -> None:
        self._expected, self._position = self._entered, 0
        self._entered, self._ended = [], []

    def in_forward(self, group: ParamGroup, chosen: Sequence[ParamGroup] = ()) -> None:
        """Prefetch `chosen`, or a guess, as `group`, on its own way already, begins its forward."""
        self._entered.append((group, None))
        self._advance(group, chosen, guess=self._forward)

    def after_forward(self, group: ParamGroup) -> None:
        """Record that `group` ended a forward that a backward can come to."""
        self._ended.append((group, group.full.dtypes if group.full else None))

    def begin_backward(self) -> None:
        self._expected, self._position = self._ended[::-1], 0

    def before_gradients(self, group: ParamGroup, chosen: Sequence[ParamGroup] = ()) -> None:
        """Prefetch `chosen`, or a guess, as backward reaches `group`, before it computes gradients."""
        self._advance(group, chosen, guess=self._backward is BackwardPrefetch.BACKWARD_PRE)

    def after_gradients(self) -> None:
        """Prefetch a guess when the gradients of the group that backward reached last are there."""
        if self._backward is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_next()

    def _advance(self, group: ParamGroup, chosen: Sequence[ParamGroup], guess: bool) -> None:
        """Go past `group`, and prefetch `chosen`, or the next group if `group` was expected at all."""
        ahead = (i for i in range(self._position, len(self._expected)) if self._expected[i][0] is group)
        expected = next(ahead, None)
        if expected is not None:
            self._position = expected + 1
        for other in chosen:
            other.prefetch()
        if guess and expected is not None and not chosen:
            self._prefetch_next()

    def _prefetch_next(self) -> None:
        if self._position < len(self._expected):
            group, dtypes = self._expected[self._position]
            group.prefetch(dtypes)


class RootState:
    """The state that the units below one root share; `root` is the outermost of them.

    Attributes:
        backward: The number of the outermost backward that goes through the units; -1 for none.
        kept: What units keep in the forward that goes on.
        with_backward: That forward began with autograd on.
        event: The next forward waits for it, once.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = tuple(units)
        self.root = self.units[0]
        for unit in self.units:
            unit.root_state = self
        config = self.root.config
        self.prefetcher = Prefetcher(config.forward_prefetch, config.backward_prefetch)
        self.backward = -1
        self.kept: list[tuple[ParamGroup, UnshardedParams]] = []
        self.with_backward = False
        self.event: torch.Event | None = None
        self._pool = BufferPool()
        self._neighbours: dict[tuple[int, ...], Axis] = {}
        self._reducing: ParamGroup | None = None
        self._forwards = 0

    @property
    def busy(self) -> bool:
        """Whether a forward or a backward of any unit is going on."""
        return self._forwards > 0 or self.in_backward

    @property
    def in_backward(self) -> bool:
        # A device's thread may let go of a backward that raised a little late.
        return self.backward != -1 and current_backward() != -1

    @untraced
    def enter_forward(self) -> bool:
        """Begin a step if this is its first unit; return whether the forward is recomputed in a backward."""
        in_backward = self.in_backward
        if self._forwards == 0 and not in_backward:
            if self.event:
                self.event.wait()
                self.event = None
            # Retained parameters may be stale, and a step that raised may have left things behind.
            self.backward = -1
            self.kept, self.with_backward = [], torch.is_grad_enabled()
            try:
                for unit in self.units:
                    unit.start()
            except BaseException:
                for unit in self.units:
                    unit.end_forward(failed=True)
                raise
            self.prefetcher.begin_forward()
        self._forwards += 1
        return in_backward

    @untraced
    def leave_forward(self, failed: bool) -> None:
        """End what `enter_forward` began.

        After a failure nothing is waited for: the other ranks may not have come as far.
        """
        self._forwards -= 1
        if self._forwards == 0 and not self.in_backward:
            for unit in self.units:
                unit.end_forward(failed)

    def kept_by_outermost(self) -> Kept:
        """Return what is kept if the outermost unit that runs now is about to end its forward."""
        return self.kept if self._forwards == 1 else ()

    def invalidate(self, stepped: Collection[Tensor]) -> None:
        for unit in self.units:
            if unit.group:
                unit.group.invalidate(stepped)

    def neighbours(self, group: ParamGroup, count: int) -> Axis:
        """Return the axis of the `count` ranks in a row that hold the parameters of `group` between them."""
        mesh = group.config.mesh
        first = mesh.index // count * count
        ranks = tuple(dist.get_process_group_ranks(mesh.process_group)[first : first + count])
        if ranks not in self._neighbours:
            # Only the members make it: other replicas may not be here now.
            self._neighbours[ranks] = Axis.of(dist.new_group(ranks, use_local_synchronization=True))
        return self._neighbours[ranks]

    def reduce(self, group: ParamGroup, full: UnshardedParams, sync: bool) -> None:
        """Start to average the gradients that `full` of `group` has; without `sync` only accumulate them.

        One reduction is in flight at a time, while the gradients of the next group are computed: that hides
        it, as each takes about as long as a group's backward, and two buffers of the largest group's size
        serve the whole backward. With more in flight each would need its own.
        """
        if not sync:
            group.gradients.accumulate(full)
            return
        self._settle()
        group.gradients.reduce(full, self._pool)
        self._reducing = group

    def enter_backward(self) -> None:
        """Make sure that the end of this backward is seen, once, in the outermost backward."""
        self.backward = current_backward()
        if self._reducing:  # by a backward that raised
            self._reducing.gradients.drop_started()
            self._reducing = None
        self.prefetcher.begin_backward()
        for unit in self.units:
            if unit.buffers.refs:
                unit.prepare_buffers()  # a forward in another mode may have come between
        end = partial(self._end_backward)
        # Autograd alone holds it, and lets go of it without a call after an exception.
        finalize(end, self._abort_backward, self.backward).atexit = False
        getattr(Variable, AUTOGRAD_ENGINE).queue_callback(end)

    @untraced
    def _end_backward(self) -> None:
        self.backward = -1
        for unit in self.units:
            unit.finish()
        self._settle()
        self._pool.clear()

    @untraced
    def _abort_backward(self, backward: int) -> None:
        """Go back to between steps if `backward` has not ended well; as after a forward, wait for nothing."""
        if self.backward == backward:
            self.backward = -1
            for unit in self.units:
                unit.abort_backward()

    def _settle(self) -> None:
        if self._reducing:
            self._reducing.gradients.settle()
            self._reducing = None
