"""A Hypothesis strategy of schedules, for property tests. Inside a rank; imports torch and Hypothesis."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import get_args

from hypothesis import strategies as st

from lockstep.bounds import is_number, is_whole, shown
from lockstep.features.injection.faults import ANY, OF_OPERATION, Fault, Kind
from lockstep.features.injection.schedule import LONGEST

__tracebackhide__ = True  # under pytest a failure points to the call

MOST = 4
"""Faults of one schedule: an order of two threads or ranks that is wrong rarely needs more."""
MILLISECONDS = (2, 10, 50)
_KINDS = tuple(kind for kind in get_args(Kind) if kind not in ("kill", "stop", "hang"))
"""Kinds after which a rank is there for the next example, and a test may pass."""


def schedules(
    ranks: int,
    collectives: int,
    *,
    kinds: Sequence[Kind] = ("delay",),
    milliseconds: Sequence[float] = MILLISECONDS,
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Return a Hypothesis strategy of schedules: up to four faults, each at a collective of its own.

    An example of it is injected by `with faults.inject(*schedule, required=False):`. It shrinks to the fewest
    faults, and each to an early collective, a low rank, the kind and the delay that come first.

    Args:
        ranks: of the world; faults are of the ranks 0 to `ranks - 1`.
        collectives: faults are before the first to this one of a rank, counted from the injection on.
        kinds: those of `Fault` but "kill", "stop" and "hang": the next example would lack a rank.
        milliseconds: how long a rank may wait, the shortest first.

    Raises:
        ValueError: an argument makes no sense.
    """
    if not all(is_whole(number) and 0 < number <= sys.maxsize for number in (ranks, collectives)):
        given = f"{shown(ranks)}, {shown(collectives)}"
        raise ValueError(f"schedules({given}): ranks and collectives are 1 or more")
    if isinstance(kinds, str) or not all(isinstance(each, Sequence) for each in (kinds, milliseconds)):
        raise ValueError(
            f"schedules(kinds={shown(kinds)}, milliseconds={shown(milliseconds)}): each is a list, such as "
            'kinds=["delay"] and milliseconds=[2, 10]'
        )
    if not kinds or (wrong := [kind for kind in kinds if kind not in _KINDS]):
        raise ValueError(f"schedules(kinds={kinds!r}): {_refusal(wrong[0] if kinds else '')}")
    if not milliseconds or not all(is_number(each) and 0 < each <= LONGEST for each in milliseconds):
        allowed = f"one or more numbers above 0, at most {LONGEST}"
        raise ValueError(f"schedules(milliseconds={shown(milliseconds)}): {allowed}")
    return _schedules(ranks, collectives, tuple(kinds), tuple(milliseconds))


def _refusal(kind: str) -> str:
    if kind not in get_args(Kind):
        return f"the kinds of faults are {', '.join(_KINDS)}"
    return (
        "an example has to leave all ranks to the next one. Look at each collective in a test of its own: "
        f'@pytest.mark.parametrize("nth", range(1, 7)), and faults.{kind}(rank=1, before="any", nth=nth)'
    )


@st.composite
def _schedules(
    draw: st.DrawFn, ranks: int, collectives: int, kinds: Sequence[Kind], milliseconds: Sequence[float]
) -> tuple[Fault, ...]:
    numbers, of_ranks = st.integers(1, collectives), st.integers(0, ranks - 1)
    entries = st.tuples(numbers, of_ranks, st.sampled_from(kinds), st.sampled_from(milliseconds))
    # Two faults in one place are one that lasts longer, or one that hides the other.
    drawn = draw(st.lists(entries, max_size=MOST, unique_by=lambda entry: entry[:2]))
    return tuple(_fault(*entry) for entry in drawn)


def _fault(nth: int, rank: int, kind: Kind, milliseconds: float) -> Fault:
    if kind in OF_OPERATION:
        return Fault(kind, rank=rank, op=ANY, nth=nth)
    seconds = milliseconds / 1000 if kind == "delay" else 0.0
    return Fault(kind, rank=rank, before=ANY, nth=nth, seconds=seconds)
