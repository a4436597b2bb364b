"""The process group that torch.distributed, DDP's reducer and functional collectives call."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.shm.channel import Channel
from harness.shm.collectives import Collectives, Operation
from harness.shm.meeting import meet
from harness.shm.signature import REDUCTIONS
from harness.shm.work import Completed, ShmWork

NAME = "shm"

# As torch annotates it, its methods have overloads that neither torch.distributed nor the trampolines call.
_ProcessGroup: Any = dist.ProcessGroup

# Seconds that a rank which leaves a group waits for peers to read what it has handed over.
_PATIENCE = 10.0


class ShmProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives between ranks of one host through shared memory.

    Args:
        channel: This rank's end of the group.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.rank, channel.size)
        self._channel = channel
        self._collectives = Collectives(channel)
        self._completed = Completed()
        # Also at the end of the process: peers may not have read all that this rank has handed over.
        self._leave = weakref.finalize(self, channel.leave, _PATIENCE)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, None)

    # -- torch's names

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._channel.name

    def getGroupName(self) -> str:
        return self._channel.name

    def _set_group_name(self, name: str) -> None:
        self._channel.name = name

    setGroupName = _set_group_name

    def _get_sequence_number_for_group(self) -> int:
        return self._channel.next_number

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._collectives.description = desc

    def size(self) -> int:
        return self._channel.size

    def rank(self) -> int:
        return self._channel.rank

    def abort(self) -> None:
        """Free all ranks that wait in a collective of this group: they raise `GroupAborted`."""
        self._channel.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor, whose values are undefined, in memory that peers can read.

        A collective whose input is there copies nothing for the peers, unless the input is the output too.
        They may read it until `await_readers` returns: until then it must not be written.

        Raises:
            OutOfSharedMemory: there is no memory for it.
        """
        return self._channel.allocate(numel, dtype)

    def await_readers(self, tensor: Tensor) -> None:
        """Return when no peer will read memory of `allocate` any more for what was called so far.

        Raises:
            ShmError: a peer that has not read it is gone, or does not read it within the timeout.
        """
        self._channel.await_readers(tensor)

    def _work(self, operation: Operation, opts: Any, result: list[Tensor]) -> dist.Work:
        if getattr(opts, "asyncOp", True):
            return ShmWork(operation, result)
        operation.complete()
        return self._completed

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        operation = self._collectives.all_reduce(tensors[0], _reduction(opts))
        return self._work(operation, opts, list(tensors))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._work(self._collectives.all_gather_single(output, input), opts, [output])

    _allgather_base = all_gather_single

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._work(self._collectives.all_gather(outputs[0], inputs[0]), opts, list(outputs[0]))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        operation = self._collectives.reduce_scatter_single(output, input, _reduction(opts))
        return self._work(operation, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        operation = self._collectives.reduce_scatter(outputs[0], inputs[0], _reduction(opts))
        return self._work(operation, opts, list(outputs))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        root = opts.rootRank if opts is not None else 0
        return self._work(self._collectives.broadcast(tensors[0], root), opts, list(tensors))

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        operation = self._collectives.reduce(tensors[0], opts.rootRank, _reduction(opts))
        return self._work(operation, opts, list(tensors))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        filled = list(outputs[0]) if outputs else []
        return self._work(self._collectives.gather(filled, inputs[0], opts.rootRank), opts, filled)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        operation = self._collectives.scatter(outputs[0], inputs[0] if inputs else (), opts.rootRank)
        return self._work(operation, opts, list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        receives: Sequence[int],
        sends: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        operation = self._collectives.all_to_all_single(output, input, receives, sends)
        return self._work(operation, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self._work(self._collectives.all_to_all(outputs, inputs), opts, list(outputs))

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._work(self._collectives.barrier(), opts, [])


def create(options: Any, backend_options: object) -> ShmProcessGroup:
    """Make the group that torch.distributed asks for; ranks meet here."""
    timeout = options.timeout
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=float(timeout))
    channel = meet(options.store, options.group_rank, options.group_size, timeout, options.group_id)
    _channels.add(channel)
    return ShmProcessGroup(channel)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # those of this process that live


def abort_all() -> None:
    """Abort every group of this process, those included that torch.distributed has forgotten."""
    for channel in list(_channels):
        channel.abort()


_NUMBERS = {getattr(dist.ReduceOp.RedOpType, name): number for number, name in enumerate(REDUCTIONS)}


def _reduction(opts: Any) -> int:
    return 0 if opts is None else _NUMBERS[opts.reduceOp.op]
