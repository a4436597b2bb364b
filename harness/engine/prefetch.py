"""Which group will be needed next, guessed from the order in which units ran before. Runs on ranks."""

from __future__ import annotations

from collections.abc import Sequence

from harness.engine.api import BackwardPrefetch
from harness.engine.group import ShardGroup
from harness.engine.precision import Dtypes

_Expected = tuple[ShardGroup, Dtypes | None]
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

    def in_forward(self, group: ShardGroup, told: Sequence[ShardGroup] = ()) -> None:
        """Gather what is ``told``, or guess, as ``group``, on its own way already, begins its forward."""
        self._entered.append((group, None))
        expected = self._advance(group)
        if told:
            _prefetch(told)
        elif expected and self._forward:
            self._prefetch_next()

    def after_forward(self, group: ShardGroup) -> None:
        """``group`` ended a forward that a backward can come to."""
        self._ended.append((group, group.full.dtypes if group.full else None))

    def begin_backward(self) -> None:
        self._expected, self._position = self._ended[::-1], 0

    def before_gradients(self, group: ShardGroup, told: Sequence[ShardGroup] = ()) -> None:
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

    def _advance(self, group: ShardGroup) -> bool:
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


def _prefetch(groups: Sequence[ShardGroup]) -> None:
    for group in groups:
        group.prefetch()
