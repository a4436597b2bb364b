"""Collectives of several tensors: all of them in one message. Imports torch only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.shm import signature
from lockstep.shm.collectives import Collectives, Contribution, flat, starts, take
from lockstep.shm.operation import Operation

__tracebackhide__ = True  # under pytest a failure points to the call


def all_reduce(ends: Collectives, tensors: Sequence[Tensor], reduction: int) -> Operation:
    """Reduce each of `tensors`, of one dtype, over all ranks, in place."""
    text = signature.pack("all_reduce", tensors[0].dtype, _sizes(tensors), reduction)
    offsets = starts(tensors)

    def finish(number: int) -> None:
        for tensor, offset in zip(tensors, offsets, strict=False):
            ends.reduce_parts(tensor, flat(tensor), offset, number, reduction)

    handed = Contribution(list(zip(offsets, tensors, strict=False)), offsets[-1])
    return ends.start(text, handed, finish, list(tensors), list(tensors))


def all_gather(ends: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Fill each of `outputs` with one of the `inputs`, of one dtype, of every rank, in rank order."""
    text = signature.pack("all_gather_single", inputs[0].dtype, _sizes(inputs))
    offsets = starts(inputs)

    def finish(number: int) -> None:
        for output, own, offset in zip(outputs, inputs, offsets, strict=False):
            whole = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
            for peer, piece in zip(ends.channel.peers, whole.data.view(ends.size, -1), strict=True):
                if peer is ends.channel.me:
                    piece.copy_(flat(own))
                else:
                    segment, start = ends.channel.contents(peer, number)
                    take(piece, segment, start + offset)
            if whole is not output:
                output.data.copy_(whole)

    handed = Contribution(list(zip(offsets, inputs, strict=False)), offsets[-1])
    return ends.start(text, handed, finish, list(inputs), list(outputs))


def reduce_scatter(
    ends: Collectives, outputs: Sequence[Tensor], inputs: Sequence[Tensor], reduction: int
) -> Operation:
    """Reduce each of `inputs`, of one dtype, over all ranks; each of `outputs` is a piece of one."""
    text = signature.pack("reduce_scatter_single", inputs[0].dtype, _sizes(inputs), reduction)
    offsets = starts(inputs)

    def finish(number: int) -> None:
        for output, whole, offset in zip(outputs, inputs, offsets, strict=False):
            start = ends.rank * output.numel()
            own = flat(whole)[start : start + output.numel()]
            ends.reduce_parts(output, own, offset + start * own.itemsize, number, reduction)

    handed = Contribution(list(zip(offsets, inputs, strict=False)), offsets[-1])
    return ends.start(text, handed, finish, list(inputs), list(outputs))


def _sizes(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple([tensor.numel() for tensor in tensors])
