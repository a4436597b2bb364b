"""Collectives in which a rank reads what others contribute where it lies, in their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lockstep.shm import signature
from lockstep.shm.collectives import Collectives, flat, of
from lockstep.shm.operation import Operation
from lockstep.shm.reduce import SUM

__tracebackhide__ = True  # under pytest a failure points to the call

Read = Callable[[Sequence[Tensor]], None]
"""A function of the 1-D contributions of all ranks, in rank order, which are valid until it returns."""


def all_gather_views(group: Collectives, input: Tensor, read: Read) -> Operation:
    """Start an all-gather of the 1-D `input`, which has the same size on all ranks.

    Ranks that call `all_gather_single` can take part.
    """

    def finish(number: int) -> None:
        read(_views(group, input.data, 0, number))

    text = signature.pack("all_gather_single", input.dtype, (input.numel(),))
    return group.start(text, of(input), finish, [input], [])


def reduce_scatter_views(group: Collectives, input: Tensor, read: Read) -> Operation:
    """Start a reduce-scatter (SUM) of the 1-D `input`, in equal pieces; `read` has to add them."""
    whole = flat(input)
    numel = whole.numel() // group.size
    own = whole[group.rank * numel : (group.rank + 1) * numel]

    def finish(number: int) -> None:
        read(_views(group, own, group.rank * own.nbytes, number))

    text = signature.pack("reduce_scatter_single", input.dtype, (numel,), SUM)
    return group.start(text, of(whole), finish, [input], [])


def _views(group: Collectives, own: Tensor, offset: int, number: int) -> list[Tensor]:
    """Return what each rank has, like `own` of this rank, at `offset` bytes of its contribution."""
    views = []
    for peer in group.channel.peers:
        if peer is group.channel.me:
            views.append(own)
        else:
            segment, at = group.channel.contents(peer, number)
            views.append(segment.tensor(at + offset, own.numel(), own.dtype))
    return views
