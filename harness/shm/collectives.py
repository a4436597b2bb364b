"""Collectives: what each rank deposits when it calls one, and collects from its peers when it waits.

A call writes what peers need into this rank's memory, and returns. Waiting is waiting until all peers have
called, comparing what they called, and copying or summing what they have deposited. So no rank needs another
one to wait, and operations may be waited for in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lockstep.shm import reduce, signature
from lockstep.shm.arguments import check_root
from lockstep.shm.channel import Channel
from lockstep.shm.errors import CollectiveMismatch, ShmError
from lockstep.shm.memory import Segment, copy, copy_to_both
from lockstep.shm.operation import Finish, NumberedCall, Operation
from lockstep.shm.peer import Outgoing
from lockstep.shm.record import Entry, recorder

__tracebackhide__ = True  # under pytest a failure points to the call

Part = tuple[int, Tensor]
"""A tensor and the offset, in bytes, at which a contribution has it."""


@dataclass(slots=True)
class Contribution:
    """The part of a collective that a rank hands over.

    Attributes:
        parts: What is copied for the peers.
        nbytes: Size of it.
        at: Address of all of it, or 0 if it is not in one piece or is overwritten by the result.
        note: Peers find it with the signature, but do not compare it.
        also_to: Address in this rank's output that what is at `at` is copied to as well, or 0.
    """

    parts: Sequence[Part] = ()
    nbytes: int = 0
    at: int = 0
    note: bytes = b""
    also_to: int = 0


NOTHING = Contribution()


class Collectives:
    """The collectives of one group.

    Args:
        channel: This rank's end of it.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.description = ""
        """Description of the group, for the record."""
        self.pending: dict[int, Operation] = {}
        """Operations that this rank has called and not completed, by number."""
        self.generation = recorder.number_group()
        channel.finish_early = self._finish_early

    def _finish_early(self, number: int) -> None:
        if operation := self.pending.get(number):
            operation.complete()

    def _forget(self, number: int) -> None:
        self.pending.pop(number, None)

    def start(
        self,
        text: bytes,
        handed: Contribution,
        finish: Finish | None,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> Operation:
        """Deposit a contribution, and return the operation.

        Args:
            text: The signature.
            handed: The contribution.
            finish: Called when all peers have called the same.
            inputs: The tensors that are read, for the record.
            outputs: Tensors that are filled.
        """
        channel = self.channel
        with channel.lock:
            number = channel.next_number
            call = NumberedCall(text, number)
            entry = Entry(signature.OPS[text[0]], number + 1, inputs, outputs)
            entry.group, entry.description = channel.name, self.description
            entry.generation, entry.timeout = self.generation, channel.timeout
            entry.group_size = self.size
            recorder.add(entry)
            try:
                message = channel.begin(handed.nbytes, call, at=handed.at)
                if handed.also_to:
                    self._put_twice(handed, message)
                elif not message.is_there:
                    for offset, tensor in handed.parts:
                        put(tensor, message.segment, message.offset + offset)
            except ShmError as error:
                self._refuse(call, error, entry)
                raise
            channel.post(message, text, handed.note)
            operation = Operation(channel, call, finish, entry, self._forget)
            self.pending[number] = operation
        return operation

    def _put_twice(self, handed: Contribution, message: Outgoing) -> None:
        if message.is_there:
            if handed.at != handed.also_to:
                copy(handed.also_to, handed.at, handed.nbytes)
        elif handed.at == handed.also_to:
            copy(message.address, handed.at, handed.nbytes)
        else:
            copy_to_both(message.address, handed.also_to, handed.at, handed.nbytes)

    def _refuse(self, call: NumberedCall, error: ShmError, entry: Entry) -> None:
        entry.complete()
        if self.channel.is_usable():
            self.channel.refuse(error)
            self.channel.mark_read(call.number)

    # -- the collectives

    def barrier(self, op: str = "barrier") -> Operation:
        return self.start(signature.pack(op), NOTHING, None, [], [])

    def all_gather_single(self, output: Tensor, input: Tensor) -> Operation:
        """Fill `output` with the `input` of every rank, in rank order."""
        nbytes, shard = input.nbytes, flat(input)
        text = signature.pack("all_gather_single", input.dtype, (input.numel(),))
        target = output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)
        start = target.data_ptr()

        def finish(number: int) -> None:
            for peer in self.channel.others:
                segment, offset = self.channel.contents(peer, number)
                copy(start + peer.rank * nbytes, segment.address + offset, nbytes)
            if target is not output:
                output.data.copy_(target)

        handed = of(shard)
        handed.also_to = start + self.rank * nbytes
        return self.start(text, handed, finish, [input], [output])

    def all_gather(self, outputs: Sequence[Tensor], input: Tensor) -> Operation:
        """Fill each of `outputs` with the `input` of one rank; sizes may differ."""
        text = signature.pack("all_gather", input.dtype, tuple([output.numel() for output in outputs]))

        return self.start(text, of(input), self._take_all(outputs, input), [input], list(outputs))

    def all_reduce(self, tensor: Tensor, reduction: int) -> Operation:
        """Reduce `tensor` over all ranks, in place."""
        text = signature.pack("all_reduce", tensor.dtype, (tensor.numel(),), reduction)

        def finish(number: int) -> None:
            self.reduce_parts(tensor, flat(tensor), 0, number, reduction)

        handed = Contribution(((0, tensor),), tensor.nbytes)  # it is overwritten: peers read a copy
        return self.start(text, handed, finish, [tensor], [tensor])

    def reduce(self, tensor: Tensor, root: int, reduction: int) -> Operation:
        """Reduce `tensor` over all ranks, in place on rank `root`."""
        check_root("reduce", root, self.size)
        text = signature.pack("reduce", tensor.dtype, (tensor.numel(),), reduction, root)
        if self.rank != root:
            return self.start(text, of(tensor), None, [tensor], [])

        def finish(number: int) -> None:
            self.reduce_parts(tensor, flat(tensor), 0, number, reduction)

        return self.start(text, NOTHING, finish, [tensor], [tensor])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, reduction: int) -> Operation:
        """Reduce `input` over all ranks; `output` is this rank's piece of the result."""
        numel, nbytes = output.numel(), output.nbytes
        text = signature.pack("reduce_scatter_single", input.dtype, (numel,), reduction)
        whole, start = flat(input), self.rank * numel
        # This rank reads its own piece where it is: what peers read lies before and behind it.
        parts: list[Part] = []
        if self.rank > 0:
            parts.append((0, whole[:start]))
        if self.rank < self.size - 1:
            parts.append(((self.rank + 1) * nbytes, whole[start + numel :]))

        def finish(number: int) -> None:
            self.reduce_parts(output, whole[start : start + numel], start * input.itemsize, number, reduction)

        handed = Contribution(parts, nbytes * self.size, whole.data_ptr())
        return self.start(text, handed, finish, [input], [output])

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], reduction: int) -> Operation:
        """Reduce each of `inputs` over all ranks; `output` is the result of one of them. Sizes may differ."""
        text = signature.pack(
            "reduce_scatter", output.dtype, tuple([input.numel() for input in inputs]), reduction
        )
        offsets = starts(inputs)
        parts = [part for rank, part in enumerate(zip(offsets, inputs, strict=False)) if rank != self.rank]

        def finish(number: int) -> None:
            self.reduce_parts(output, flat(inputs[self.rank]), offsets[self.rank], number, reduction)

        return self.start(text, Contribution(parts, offsets[-1]), finish, list(inputs), [output])

    def broadcast(self, tensor: Tensor, root: int) -> Operation:
        """Overwrite `tensor` with that of rank `root`."""
        check_root("broadcast", root, self.size)
        text = signature.pack("broadcast", tensor.dtype, (tensor.numel(),), root=root)
        if self.rank == root:
            return self.start(text, of(tensor), None, [tensor], [tensor])

        def finish(number: int) -> None:
            take(tensor, *self.channel.contents(self.channel.peers[root], number))

        return self.start(text, NOTHING, finish, [tensor], [tensor])

    def gather(self, outputs: Sequence[Tensor], input: Tensor, root: int) -> Operation:
        """Fill each of `outputs`, on rank `root`, with the `input` of one rank."""
        check_root("gather", root, self.size)
        text = signature.pack("gather", input.dtype, (input.numel(),), root=root)
        if self.rank != root:
            return self.start(text, of(input), None, [input], [])
        return self.start(text, NOTHING, self._take_all(outputs, input), [input], list(outputs))

    def _take_all(self, outputs: Sequence[Tensor], input: Tensor) -> Finish:
        """Return what fills each of `outputs` with what one rank has handed in, this rank's `input` too."""

        def finish(number: int) -> None:
            for output, peer in zip(outputs, self.channel.peers, strict=True):
                if peer is self.channel.me:
                    output.data.copy_(input)
                else:
                    take(output, *self.channel.contents(peer, number))

        return finish

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> Operation:
        """Fill `output` with one of the `inputs` of rank `root`."""
        check_root("scatter", root, self.size)
        text = signature.pack("scatter", output.dtype, (output.numel(),), root=root)
        if self.rank == root:
            offsets = starts(inputs)
            parts = list(zip(offsets, inputs, strict=False))
            del parts[root]

            def finish(number: int) -> None:
                output.data.copy_(inputs[root])

            return self.start(text, Contribution(parts, offsets[-1]), finish, list(inputs), [output])

        def finish_here(number: int) -> None:
            segment, offset = self.channel.contents(self.channel.peers[root], number)
            take(output, segment, offset + self.rank * aligned(output.nbytes))

        return self.start(text, NOTHING, finish_here, [], [output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receives: Sequence[int], sends: Sequence[int]
    ) -> Operation:
        """Fill `output` with a piece of the `input` of each rank, in rank order.

        Args:
            output: Tensor in which rows of the first dimension are received.
            input: Tensor with the rows to send.
            receives: Rows from each rank; none are as many from each.
            sends: Rows to each rank; none are as many to each.
        """
        received, sent = flat(output), flat(input)
        expected, given = self._elements(output, receives), self._elements(input, sends)
        text = signature.pack("all_to_all_single", input.dtype)
        handed, fill = self._exchange(text, torch.split(received, expected), torch.split(sent, given))
        handed.at = sent.data_ptr()  # in one piece, as the pieces lie side by side

        def finish(number: int) -> None:
            fill(number)
            if received.data_ptr() != output.data_ptr():
                output.data.copy_(received.view(output.shape))

        return self.start(text, handed, finish, [input], [output])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
        """Fill each of `outputs` with one of the `inputs` of one rank. Sizes may differ."""
        text = signature.pack("all_to_all", outputs[0].dtype)
        handed, finish = self._exchange(text, outputs, inputs)
        return self.start(text, handed, finish, list(inputs), list(outputs))

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Return how many elements each of `rows` of a tensor are."""
        if not rows:
            return [tensor.numel() // self.size] * self.size
        of_row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
        return [of_row * number for number in rows]

    def _exchange(
        self, text: bytes, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Contribution, Finish]:
        """Return what to hand over, and what fills each of `outputs` with what one rank has for this one."""
        expected, given = [one.numel() for one in outputs], [one.numel() for one in inputs]
        note = struct.pack(f"<{2 * self.size}q", *given, *expected)
        offsets = list(accumulate((one.nbytes for one in inputs), initial=0))
        parts = [part for rank, part in enumerate(zip(offsets, inputs, strict=False)) if rank != self.rank]

        def finish(number: int) -> None:
            sent = self._check_exchange(number, text, note)
            for rank, (output, peer) in enumerate(zip(outputs, self.channel.peers, strict=True)):
                if rank == self.rank:
                    output.data.copy_(inputs[rank].data)
                elif sent[rank][self.rank]:
                    segment, offset = self.channel.contents(peer, number)
                    take(output, segment, offset + sum(sent[rank][: self.rank]) * output.itemsize)

        return Contribution(parts, offsets[-1], note=note), finish

    def _check_exchange(self, number: int, text: bytes, note: bytes) -> list[tuple[int, ...]]:
        """Return how many elements each rank sends to each.

        Raises:
            CollectiveMismatch: a rank sends another number of elements than is expected of it; on all ranks.
        """
        channel, size = self.channel, self.size
        notes = [note if peer is channel.me else channel.note(peer, number, text) for peer in channel.peers]
        numbers = [struct.unpack(f"<{2 * size}q", one) for one in notes]
        sent, received = [one[:size] for one in numbers], [one[size:] for one in numbers]
        if list(zip(*sent, strict=True)) == received:
            return sent
        wrong = [
            f"{channel.peers[a]} sends {sent[a][b]} elements to {channel.peers[b]}, "
            f"which expects {received[b][a]}"
            for a in range(size)
            for b in range(size)
            if sent[a][b] != received[b][a]
        ]
        raise CollectiveMismatch(f"{NumberedCall(text, number)} of group {channel.name}: {'; '.join(wrong)}")

    def reduce_parts(self, output: Tensor, own: Tensor, offset: int, number: int, reduction: int) -> None:
        """Reduce this rank's part, and what peers have at `offset` of their contributions, into `output`."""
        numel, dtype = own.numel(), own.dtype
        if not numel:
            return
        parts = []
        for peer in self.channel.peers:
            if peer is self.channel.me:
                parts.append(own.data)
            else:
                segment, at = self.channel.contents(peer, number)
                parts.append(segment.tensor(at + offset, numel, dtype))
        if output.is_contiguous():
            reduce.reduce_into(output.data.view(-1), parts, reduction)
        else:
            result = torch.empty(numel, dtype=dtype)
            reduce.reduce_into(result, parts, reduction)
            output.data.copy_(result.view(output.shape))


def of(tensor: Tensor) -> Contribution:
    """Return a contribution that is a whole tensor."""
    at = tensor.data_ptr() if tensor.is_contiguous() else 0
    return Contribution(((0, tensor),), tensor.nbytes, at)


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor as one dimension, in one piece: the same memory if it is contiguous, else a copy."""
    return tensor.data.contiguous().view(-1)  # `reshape` returns a view of what is evenly strided


def aligned(nbytes: int) -> int:
    """Return a size that keeps what follows at a multiple of 64 bytes."""
    return (nbytes + 63) & ~63


def starts(tensors: Iterable[Tensor]) -> list[int]:
    """Return where each tensor starts in a contribution, and the size of all."""
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + aligned(tensor.nbytes))
    return offsets


def put(tensor: Tensor, segment: Segment, offset: int) -> None:
    """Copy a tensor into a segment."""
    if tensor.is_contiguous():
        copy(segment.address + offset, tensor.data_ptr(), tensor.nbytes)
    else:
        segment.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor.data)


def take(tensor: Tensor, segment: Segment, offset: int) -> None:
    """Copy from a segment into a tensor."""
    if tensor.is_contiguous():
        copy(tensor.data_ptr(), segment.address + offset, tensor.nbytes)
    else:
        tensor.data.copy_(segment.tensor(offset, tensor.numel(), tensor.dtype).view(tensor.shape))
