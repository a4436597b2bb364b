"""The process group that torch.distributed, DDP's reducer and functional collectives call."""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.shm import coalesced
from lockstep.shm.arguments import (
    check_length,
    check_numel,
    check_splits,
    check_tensors,
    premultiplied,
    reduction_of,
)
from lockstep.shm.channel import Channel
from lockstep.shm.collectives import Collectives
from lockstep.shm.in_place import Read, all_gather_views, reduce_scatter_views
from lockstep.shm.meeting import meet
from lockstep.shm.p2p import ANY, Mailbox
from lockstep.shm.reduce import PREMUL_SUM
from lockstep.shm.torch_internals import backend_options, empty_backend
from lockstep.shm.work import Bundle, Completed, Pending, ShmWork, progress

__tracebackhide__ = True  # under pytest a failure points to the call

NAME = "shm"

# As torch annotates it, its methods have overloads that neither torch.distributed nor the trampolines call.
_ProcessGroup: Any = dist.ProcessGroup

# Seconds that a rank which leaves a group waits for peers to read what it has handed over.
_PATIENCE = 10.0


class ShmProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """Collectives between ranks of one host through shared memory.

    Args:
        channel: This rank's end of the group.
        store: Store of the group alone.
    """

    def __init__(self, channel: Channel, store: dist.Store) -> None:
        super().__init__(channel.rank, channel.size)
        self._channel = channel
        self._store = store
        self._collectives = Collectives(channel)
        self._mailbox = Mailbox(channel, self._collectives)
        self._bundle: list[dist.Work] | None = None
        self._splits: dict[str, int] = {}
        self._completed = Completed()
        # Also at the end of the process: peers may not have read all that this rank has handed over.
        self._leave = weakref.finalize(self, channel.leave, _PATIENCE)
        backend = empty_backend(channel.rank, channel.size)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)

    # -- torch's names

    def __repr__(self) -> str:
        return f"<group {self.group_name} of backend {NAME}, rank {self.rank()} of {self.size()}>"

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
        self._collectives.description = desc

    setGroupDesc = _set_group_desc

    @property
    def group_desc(self) -> str:
        return self._collectives.description

    def getGroupDesc(self) -> str:
        return self._collectives.description

    def abort(self) -> None:
        """Free all ranks that wait in a collective of this group: they raise `GroupAborted`."""
        self._channel.abort()

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave()
        progress.rest()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of undefined values in memory that peers can read.

        A collective with its input there copies nothing for the peers, unless the input is the output too.
        They may read it until `await_readers` returns: until then it must not be written.

        Raises:
            OutOfSharedMemory: there is no memory for it.
            ShmError: this rank has left the group.
        """
        return self._channel.allocate(numel, dtype)

    def await_readers(self, tensor: Tensor) -> None:
        """Return when no peer will read memory of `allocate` any more for what was called so far.

        Raises:
            ShmError: a peer that has not read it is gone, or does not read it within the timeout.
        """
        self._channel.await_readers(tensor)

    def all_gather_views(self, input: Tensor, read: Read) -> dist.Work:
        """Start an all-gather of the 1-D `input`: a wait calls `read` with all ranks', where they lie."""
        return ShmWork(all_gather_views(self._collectives, input, read), [])

    def reduce_scatter_views(self, input: Tensor, read: Read) -> dist.Work:
        """Start a reduce-scatter of the 1-D `input`: a wait calls `read` with the pieces to add."""
        return ShmWork(reduce_scatter_views(self._collectives, input, read), [])

    # -- what torch.distributed asks of a backend: the group is its own

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False
    """Torch then makes new groups by `new_group`, and batches of messages one by one."""

    def _get_backend(self, device: torch.device) -> ShmProcessGroup:
        """Return the group, which has the methods of a backend.

        Raises:
            RuntimeError: it is no device of this backend; torch.distributed expects that type.
        """
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"group {self.group_name} of backend shm has no backend for device {device}")
        return self

    @property
    def options(self) -> Any:
        return backend_options(NAME, datetime.timedelta(seconds=self._channel.timeout))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Let waits from now on last as long as this."""
        self._channel.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device | None) -> None: ...

    def _set_sequence_number_for_group(self) -> None: ...

    def _wait_for_pending_works(self) -> None: ...

    def get_group_store(self) -> dist.Store:
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> ShmProcessGroup | None:
        """Return a group of some ranks of this one, all of which call this; None on other ranks."""
        ranks = sorted(ranks)
        if self.rank() not in ranks:
            return None
        members = "_".join(map(str, ranks))
        self._splits[members] = nth = self._splits.get(members, 0) + 1
        name = group_name or f"{self.group_name}:split:{members}:{nth}"
        store = dist.PrefixStore(f"split/{members}/{nth}", self._store)
        timeout = timeout or datetime.timedelta(seconds=self._channel.timeout)
        group = _join(store, ranks.index(self.rank()), len(ranks), timeout, name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split:{nth}")
        return group

    splitGroup = split_group

    # -- works

    def _work(self, pending: Pending, opts: Any, result: Any) -> dist.Work:
        if getattr(opts, "asyncOp", True):
            work = ShmWork(pending, result)
            if self._bundle is not None:
                self._bundle.append(work)
            return work
        pending.complete()
        return self._completed

    def _start_coalescing(self, device: torch.device) -> None:
        self._bundle = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        bundle, self._bundle = self._bundle or [], None
        return ShmWork(Bundle(bundle), [])

    # -- collectives, under the names that torch has for them

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = tensors[0]
        check_tensors("all_reduce", tensors, tensor.dtype, filled=tensors)
        reduction = reduction_of("all_reduce", opts, tensor.dtype)
        if reduction == PREMUL_SUM:
            tensor.copy_(premultiplied(opts, reduction, tensor))
        return self._work(self._collectives.all_reduce(tensor, reduction), opts, [tensor])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        tensors = list(tensors)
        if len({tensor.dtype for tensor in tensors}) != 1:
            return self._each(self.allreduce, [([tensor],) for tensor in tensors], opts)
        check_tensors("all_reduce", tensors, tensors[0].dtype, filled=tensors)
        reduction = reduction_of("all_reduce", opts, tensors[0].dtype)
        for tensor in tensors if reduction == PREMUL_SUM else ():
            tensor.copy_(premultiplied(opts, reduction, tensor))
        return self._work(coalesced.all_reduce(self._collectives, tensors, reduction), opts, tensors)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        check_tensors("all_gather_single", (output, input), input.dtype, filled=(output,))
        check_numel("all_gather_single", output, input, self.size())
        return self._work(self._collectives.all_gather_single(output, input), opts, [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        outputs, inputs = list(outputs), list(inputs)
        if len({tensor.dtype for tensor in inputs}) != 1:
            return self._each(self.all_gather_single, list(zip(outputs, inputs, strict=True)), opts)
        check_tensors("all_gather_single", [*outputs, *inputs], inputs[0].dtype, filled=outputs)
        for output, input in zip(outputs, inputs, strict=True):
            check_numel("all_gather_single", output, input, self.size())
        return self._work(coalesced.all_gather(self._collectives, outputs, inputs), opts, outputs)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        filled = list(outputs[0])
        check_tensors("all_gather", (*filled, inputs[0]), inputs[0].dtype, filled=filled)
        check_length("all_gather", filled, self.size())
        check_numel("all_gather", filled[self.rank()], inputs[0], 1)
        return self._work(self._collectives.all_gather(filled, inputs[0]), opts, filled)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        lists = zip(*outputs, strict=True)
        return self._each(
            self.allgather, [([list(of)], [one]) for of, one in zip(lists, inputs, strict=True)], opts
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        check_tensors("reduce_scatter_single", (output, input), input.dtype, filled=(output,))
        check_numel("reduce_scatter_single", input, output, self.size())
        reduction = reduction_of("reduce_scatter_single", opts, input.dtype)
        input = premultiplied(opts, reduction, input)
        return self._work(self._collectives.reduce_scatter_single(output, input, reduction), opts, [output])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        outputs, inputs = list(outputs), list(inputs)
        if len({tensor.dtype for tensor in inputs}) != 1:
            return self._each(self.reduce_scatter_single, list(zip(outputs, inputs, strict=True)), opts)
        check_tensors("reduce_scatter_single", [*outputs, *inputs], inputs[0].dtype, filled=outputs)
        for output, input in zip(outputs, inputs, strict=True):
            check_numel("reduce_scatter_single", input, output, self.size())
        reduction = reduction_of("reduce_scatter_single", opts, inputs[0].dtype)
        inputs = [premultiplied(opts, reduction, input) for input in inputs]
        operation = coalesced.reduce_scatter(self._collectives, outputs, inputs, reduction)
        return self._work(operation, opts, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        output, pieces = outputs[0], list(inputs[0])
        check_tensors("reduce_scatter", (output, *pieces), output.dtype, filled=(output,))
        check_length("reduce_scatter", pieces, self.size())
        check_numel("reduce_scatter", pieces[self.rank()], output, 1)
        reduction = reduction_of("reduce_scatter", opts, output.dtype)
        pieces = [premultiplied(opts, reduction, piece) for piece in pieces]
        return self._work(self._collectives.reduce_scatter(output, pieces, reduction), opts, [output])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        tensor, root = tensors[0], opts.rootRank if opts is not None else 0
        check_tensors("broadcast", (tensor,), tensor.dtype, filled=(tensor,) if root != self.rank() else ())
        return self._work(self._collectives.broadcast(tensor, root), opts, [tensor])

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        tensor = tensors[0]
        check_tensors("reduce", (tensor,), tensor.dtype)
        reduction = reduction_of("reduce", opts, tensor.dtype)
        scaled = premultiplied(opts, reduction, tensor)
        if opts.rootRank == self.rank() and scaled is not tensor:
            tensor.copy_(scaled)
            scaled = tensor
        return self._work(self._collectives.reduce(scaled, opts.rootRank, reduction), opts, [tensor])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        filled, input = list(outputs[0]) if outputs else [], inputs[0]
        check_tensors("gather", (*filled, input), input.dtype, filled=filled)
        if opts.rootRank == self.rank():
            check_length("gather", filled, self.size())
            for output in filled:
                check_numel("gather", output, input, 1)
        return self._work(self._collectives.gather(filled, input, opts.rootRank), opts, filled)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        output, pieces = outputs[0], list(inputs[0]) if inputs else []
        check_tensors("scatter", (output, *pieces), output.dtype, filled=(output,))
        if opts.rootRank == self.rank():
            check_length("scatter", pieces, self.size())
            for piece in pieces:
                check_numel("scatter", piece, output, 1)
        return self._work(self._collectives.scatter(output, pieces, opts.rootRank), opts, [output])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        receives: Sequence[int],
        sends: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        check_tensors("all_to_all_single", (output, input), input.dtype, filled=(output,))
        check_splits(output, receives, self.size())
        check_splits(input, sends, self.size())
        operation = self._collectives.all_to_all_single(output, input, receives, sends)
        return self._work(operation, opts, [output])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        outputs, inputs = list(outputs), list(inputs)
        check_tensors("all_to_all", [*outputs, *inputs], inputs[0].dtype, filled=outputs)
        check_length("all_to_all", outputs, self.size())
        check_length("all_to_all", inputs, self.size())
        return self._work(self._collectives.all_to_all(outputs, inputs), opts, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        timeout = getattr(opts, "timeout", None)
        operation = self._collectives.barrier()
        if timeout is not None and timeout > datetime.timedelta(0) and not opts.asyncOp:
            operation.complete(timeout.total_seconds())
        return self._work(operation, opts, [])

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error names each that did not come.

        `torch.distributed.monitored_barrier` refuses all backends but gloo, by their name.
        """
        seconds = timeout.total_seconds() if timeout is not None else None
        self._collectives.barrier("monitored_barrier").complete(seconds)

    def _each(
        self, collective: Callable[..., dist.Work], calls: Sequence[tuple[Any, ...]], opts: Any
    ) -> dist.Work:
        """Call a collective for each tuple of arguments, and return one work."""
        single = _Started(opts)
        works = [collective(*arguments, single) for arguments in calls]
        return self._work(Bundle(works), opts, [])

    # -- messages

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        check_tensors("send", tensors, tensors[0].dtype)
        return self._work(self._mailbox.send(tensors[0], peer, tag), None, list(tensors))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int = 0) -> dist.Work:
        check_tensors("recv", tensors, tensors[0].dtype, filled=tensors)
        return self._work(self._mailbox.receive(tensors[0], peer, tag), None, list(tensors))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        return self.recv(tensors, ANY, tag)

    # -- names that torch had until 2.13, and of some code that calls a group's methods itself

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


class _Started:
    """Options of a collective of a coalesced call: the same, but not waited for."""

    asyncOp = True

    def __init__(self, opts: Any) -> None:
        self.reduceOp = getattr(opts, "reduceOp", None)


def create(options: Any, _: object) -> ShmProcessGroup:
    """Make the group that torch.distributed asks for; ranks meet here."""
    timeout = options.timeout
    if not isinstance(timeout, datetime.timedelta):
        timeout = datetime.timedelta(seconds=float(timeout))
    return _join(options.store, options.group_rank, options.group_size, timeout, options.group_id)


def _join(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, name: str) -> ShmProcessGroup:
    channel = meet(store, rank, size, timeout, name)
    _channels.add(channel)
    return ShmProcessGroup(channel, store)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()  # those of this process that live


def abort_all() -> None:
    """Abort every group of this process, those included that torch.distributed has forgotten."""
    for channel in list(_channels):
        channel.abort()
