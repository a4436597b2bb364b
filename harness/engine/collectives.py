"""Every torch.distributed collective the engine runs, and the arithmetic of reductions. Runs on ranks.

Gathers and reductions are started and finished apart, so that ranks compute in between. On a backend with
streams (nccl) to wait is to order the streams: the host goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from lockstep.engine.layout import Usage, keep
from lockstep.engine.mesh import Axis, MeshInfo
from lockstep.engine.torch_internals import FastLabel, num_dispatch_modes


class BufferPool:
    """Lend 1-D buffers whose values are undefined, and keep returned ones until `clear`.

    Groups send their gradients from them and receive those of others in them.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device, axis: Axis | None = None) -> Tensor:
        """Return a 1-D buffer of `numel` elements: one that is free and large enough, else a new one.

        One to be sent to the ranks of `axis` lies where they read it, if they read in place; it need not be
        given back.
        """
        if axis and axis.in_place:
            return axis.in_place.allocate(numel, dtype)
        if numel == 0:  # it would have no address to be known by
            return torch.empty(0, dtype=dtype, device=device)
        # Which of several makes no difference: a reduction takes none that is larger than its first.
        fitting = [b for b in self._free if (b.dtype, b.device) == (dtype, device) and b.numel() >= numel]
        whole = fitting[0] if fitting else torch.empty(numel, dtype=dtype, device=device)
        self._free = [buffer for buffer in self._free if buffer is not whole]
        self._lent[whole.data_ptr()] = whole
        return whole[:numel]

    def take_like(self, other: Tensor) -> Tensor:
        return self.take(other.numel(), other.dtype, other.device)

    def give(self, buffer: Tensor, poison: bool = False) -> None:
        """Lend `buffer` again; with `poison` filled with NaN. What did not come from here is left alone."""
        if (whole := self._lent.pop(buffer.data_ptr(), None)) is not None:
            self._free.append(whole.fill_(float("nan")) if poison else whole)

    def clear(self) -> None:
        """Free all returned buffers, and forget those that were lent and never returned."""
        self._free, self._lent = [], {}


T = TypeVar("T")

GATHER = "lockstep::gather"
REDUCE = "lockstep::reduce"
SPREAD = "lockstep::spread"
WRAP = "lockstep::wrap"
"""The names, in a profile, of the parts of a step and of wrapping that communicate."""

LOW_PRECISION = (torch.float16, torch.bfloat16)

Finish = Callable[[], Tensor]
"""Wait for a collective and return its result; to be called once."""

Read = Callable[[Sequence[Tensor]], None]
"""Use what ranks have sent, in rank order, which is valid until it returns."""

# torch 2.13 renamed them; there the older names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# How many elements are summed at once: their fp32 sum stays in a core's L2 cache (256 KiB) until it is whole.
_CHUNK_NUMEL = 1 << 16


@dataclass(frozen=True)
class Sum:
    """Options of a reduction.

    Attributes:
        divisor: Divides the sum; None is the number of ranks.
        carried: A shard from an earlier `start_inside`, which is added before the sum across replicas.
        usage: Keep its marks in the sum.
    """

    divisor: float | None = None
    carried: Tensor | None = None
    usage: Usage | None = None

    def over(self, mesh: MeshInfo) -> float:
        """Return the divisor of a sum over all ranks of `mesh`."""
        return mesh.size if self.divisor is None else self.divisor


MEAN = Sum()


def start_gather(full: Tensor, shard: Tensor, axis: Axis) -> Finish:
    """Start to fill `full` (1-D, S * n) with the 1-D `shard` (n) of each of the S ranks, in order.

    Neither may be touched until the result, `full`, is there.
    """
    with _labelled(GATHER):
        return _start_gather(full, shard, axis)


def start_exchange(shard: Tensor, axis: Axis, arrived: Read) -> Callable[[], None]:
    """Start to gather the 1-D `shard` of each of the S ranks; what is returned waits, and calls `arrived`.

    That gets all shards in order, in one or several 1-D tensors, which are valid until it returns; none if
    they have no elements. Until then `shard` may not be touched.
    """
    if not shard.numel():
        return lambda: arrived(())
    with _labelled(GATHER):
        if axis.in_place:
            return _after(axis.in_place.all_gather_views(shard, arrived), lambda: None)
        if _is_gloo_pair(shard, axis):
            other = torch.empty_like(shard)
            pair = (shard, other) if axis.rank == 0 else (other, shard)
            return _after(_swap(other, shard, axis), lambda: arrived(pair))
        full = _start_gather(shard.new_empty(axis.size * shard.numel()), shard, axis)
    return lambda: arrived((full(),))


def as_sent(shard: Tensor, dtype: torch.dtype, device: torch.device, axis: Axis) -> Tensor:
    """Return a copy of the 1-D `shard` in `dtype` on `device`, where ranks of `axis` can read it in place."""
    if axis.in_place:
        return axis.in_place.allocate(shard.numel(), dtype).copy_(shard)
    return shard.to(device=device, dtype=dtype)


def start_mean(
    full: Tensor, mesh: MeshInfo, dtype: torch.dtype, pool: BufferPool, sum_: Sum = MEAN
) -> Finish:
    """Start the mean over ranks of `full` (1-D, S * n); the result is this rank's shard (n) in `dtype`.

    `full` is used up. The result is rounded to its dtype before it becomes `dtype`, and shares its memory
    only where there is one shard.

    Reduces inside the shard axis, then across the replicate axis, and divides once. Except on nccl, ranks of
    the shard axis exchange pieces and add them in rank order, in fp32 (fp64 for fp64), and so do those of the
    replicate axis in low precision: the result is rounded once per axis, with the same bits on every run.
    """
    across, divisor, usage = mesh.replicate, sum_.over(mesh), sum_.usage
    # The marks of the result matter to a rank that looks at them.
    own = usage if usage and usage.needed else None
    with _labelled(REDUCE):
        if not full.numel() or mesh.size == 1:
            if own:
                own.set(full)
            return lambda: keep(
                own, (full,), lambda: (full if divisor == 1 else full.div_(divisor)).to(dtype)
            )
        if mesh.shard is None:
            assert across is not None
            reduced = _start_all_reduce(full, across, Sum(divisor, usage=usage), pool)
            return lambda: _cast(reduced(), dtype, own)
        if across is None:
            return _start_reduce_scatter(full, mesh.shard, Sum(divisor, usage=usage), dtype, pool)
        scattered = start_inside(full, mesh, pool, Sum(divisor, usage=usage))
    of_shard = usage.piece(*_piece(full, mesh.shard)) if usage else None

    def finish() -> Tensor:
        with _labelled(REDUCE):
            shard = scattered()
            if sum_.carried is not None:
                shard += sum_.carried
            reduced = _start_all_reduce(shard, across, Sum(1, usage=of_shard), pool)()
            return _cast(reduced, dtype, of_shard if own else None)

    return finish


def start_inside(full: Tensor, mesh: MeshInfo, pool: BufferPool, sum_: Sum) -> Finish:
    """Do the half of `start_mean` that is inside the shard axis; the result has the dtype of `full`."""
    assert mesh.shard is not None
    with _labelled(REDUCE):
        usage = sum_.usage and sum_.usage.sent_on()
        return _start_reduce_scatter(full, mesh.shard, Sum(sum_.over(mesh), usage=usage), full.dtype, pool)


def total(values: Tensor, groups: Iterable[dist.ProcessGroup], largest: bool = False) -> Tensor:
    """Return the sum over the ranks of all `groups` of `values`, or the element-wise largest.

    A NaN of any rank makes the result NaN.
    """
    for group in groups:
        if largest:
            everyone = values.new_empty(dist.get_world_size(group) * values.numel())
            # gloo's own MAX would drop a NaN.
            _all_gather(everyone, values.reshape(-1), group=group)
            values = everyone.view(-1, *values.shape).amax(0)
        else:
            dist.all_reduce(values, group=group)
    return values


def broadcast(tensors: Iterable[Tensor], groups: Iterable[dist.ProcessGroup]) -> None:
    """Overwrite each tensor with that of the rank that is first in all `groups`, shard axis first."""
    sent = [(tensor, tensor.contiguous()) for tensor in tensors if tensor.numel()]
    # In this order: the first rank of each replica has the values only after the first replica has them.
    for group in groups:
        source = dist.get_global_rank(group, 0)
        for tensor, copy in sent:
            dist.broadcast(copy, source, group=group)
            if copy is not tensor:
                tensor.copy_(copy)


def divide_factors(size: float) -> tuple[float, float]:
    """Return (p, size / p): divide by p before the sum and by the rest after it, together by `size`.

    p is the power of two near sqrt(size): half of the range that a low-precision sum can overflow or
    underflow is kept on each side.
    """
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return float(before), size / before


def _labelled(name: str) -> AbstractContextManager[Any]:
    """Return a context that has `name` in profiles, and in logs that are dispatch modes.

    These see an operation, which costs 6 us, and a step of six units has twenty.
    """
    return record_function(name) if num_dispatch_modes() else FastLabel(name)


def _start_gather(full: Tensor, shard: Tensor, axis: Axis) -> Finish:
    if not full.numel():
        return lambda: full
    if axis.in_place:
        rows = full.view(axis.size, -1).unbind()

        def read(shards: Sequence[Tensor]) -> None:
            for row, sent in zip(rows, shards, strict=True):
                row.copy_(sent)

        return _after(axis.in_place.all_gather_views(shard, read), lambda: full)
    if _is_gloo_pair(full, axis):
        halves = full.view(2, -1)
        work = _swap(halves[1 - axis.rank], shard, axis)
        halves[axis.rank].copy_(shard)
    else:
        work = _all_gather(full, shard, group=axis.group, async_op=True)
    return _after(work, lambda: full)


def _after(work: dist.Work, result: Callable[[], T]) -> Callable[[], T]:
    """Return a function that waits for `work` and returns `result()`."""

    def finish() -> T:
        work.wait()
        return result()

    return finish


def _is_gloo_pair(tensor: Tensor, axis: Axis) -> bool:
    return axis.size == 2 and axis.backends.get(tensor.device.type) == "gloo"


def _swap(other: Tensor, shard: Tensor, axis: Axis) -> dist.Work:
    """Start to gather on two ranks: each sends its `shard` straight into the memory where it is needed.

    gloo's own all_gather receives into a second buffer of the size of the result and copies it. For more
    ranks such exchanges were no faster than that in benchmarks/engine.py.
    """
    splits = [0, shard.numel()] if axis.rank == 0 else [shard.numel(), 0]
    work: dist.Work = dist.all_to_all_single(other, shard, splits, splits, group=axis.group, async_op=True)
    return work


def _start_reduce_scatter(
    full: Tensor, axis: Axis, sum_: Sum, dtype: torch.dtype, pool: BufferPool
) -> Finish:
    """Start the sum over `axis`, divided; the result is this rank's piece of it in `dtype`."""
    divisor, usage = sum_.divisor or axis.size, sum_.usage
    kept = usage.piece(*_piece(full, axis)) if usage and usage.needed else None
    if axis.backends.get(full.device.type) == "nccl":
        # nccl sums in the dtype that it sends. Half of the division comes before the sum, so that this
        # neither overflows nor underflows.
        before, after = divide_factors(divisor)
        shard = full.new_empty(full.numel() // axis.size)
        full.div_(before)
        if usage:
            usage.set(full)
        work = _reduce_scatter(shard, full, group=axis.group, async_op=True)
        return _after(work, lambda: keep(kept, (shard,), lambda: shard.div_(after).to(dtype)))
    if usage:
        usage.set(full)
    if axis.in_place:
        shards: list[Tensor] = []

        def read(parts: Sequence[Tensor]) -> None:
            shards.append(keep(kept, parts, lambda: _sum_in_order(parts, divisor, dtype)))

        return _after(axis.in_place.reduce_scatter_views(full, read), shards.pop)
    received = pool.take_like(full)

    def result() -> Tensor:
        parts = received.view(axis.size, -1).unbind()
        shard = keep(kept, parts, lambda: _sum_in_order(parts, divisor, dtype))
        pool.give(received)
        return shard

    return _after(dist.all_to_all_single(received, full, group=axis.group, async_op=True), result)


def _piece(full: Tensor, axis: Axis) -> tuple[int, int]:
    """Return where the shard of this rank starts and ends in `full`."""
    numel = full.numel() // axis.size
    return axis.rank * numel, (axis.rank + 1) * numel


def _start_all_reduce(full: Tensor, axis: Axis, sum_: Sum, pool: BufferPool) -> Finish:
    """Start the sum over `axis`, divided; the result has all of it and may share memory with `full`."""
    divisor, usage = sum_.divisor or axis.size, sum_.usage
    if full.dtype in LOW_PRECISION and axis.backends.get(full.device.type) != "nccl":
        # gloo would round after each addition: sum pieces in fp32 as a reduce-scatter does, and spread them.
        padded = full.new_zeros(-(-full.numel() // axis.size) * axis.size)
        padded[: full.numel()] = full
        sent = Sum(divisor, usage=usage and usage.sent_on())
        scattered = _start_reduce_scatter(padded, axis, sent, full.dtype, pool)

        def finish() -> Tensor:
            with _labelled(SPREAD):
                _start_gather(padded, scattered(), axis)()
            return padded[: full.numel()]

        return finish
    before, after = divide_factors(divisor)
    full.div_(before)
    if usage:
        usage.set(full)
    work = dist.all_reduce(full, group=axis.group, async_op=True)
    return _after(
        work, lambda: keep(usage if usage and usage.needed else None, (full,), lambda: full.div_(after))
    )


def _cast(reduced: Tensor, dtype: torch.dtype, usage: Usage | None) -> Tensor:
    return reduced if reduced.dtype == dtype else keep(usage, (reduced,), lambda: reduced.to(dtype))


def _sum_in_order(parts: Sequence[Tensor], divisor: float, dtype: torch.dtype) -> Tensor:
    """Return the sum of the 1-D `parts`, one of each rank, each added in turn in fp32 or fp64, divided.

    It is rounded to the dtype of `parts` and returned in `dtype`.
    """
    sent = parts[0].dtype
    shard = parts[0].new_empty(parts[0].numel(), dtype=dtype)
    precise = torch.promote_types(sent, torch.float32)
    pieces: Iterable[tuple[Tensor, ...]] = [(shard, *parts)]
    if shard.numel() > _CHUNK_NUMEL:
        pieces = zip(*(torch.split(each, _CHUNK_NUMEL) for each in (shard, *parts)), strict=True)
    for piece, *of_ranks in pieces:
        summed = piece if dtype == precise else torch.empty_like(piece, dtype=precise)
        torch.add(of_ranks[0].to(precise), of_ranks[1], out=summed)
        for of_rank in of_ranks[2:]:
            summed.add_(of_rank)
        summed.div_(divisor)
        if not dtype == sent == precise:
            piece.copy_(summed.to(sent))
    return shard


def gather_objects(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return the picklable `value` of every rank, in rank order."""
    size = dist.get_world_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def gather_wrapped(
    value: list[str], beside: Callable[[], list[str]], group: dist.ProcessGroup, device: torch.device
) -> list[tuple[list[str], list[str]]]:
    """Return the pair (`value`, `beside()`) of each rank, in rank order, if `value` differs; else nothing."""
    digest = sha256("\n".join(value).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int32).long()
    # The largest of all ranks' words and the largest of their negatives: those of this rank where all agree.
    # Of the collectives of so few bytes an all-reduce costs the least.
    largest = torch.stack([mine, -mine]).to(device)
    with _labelled(WRAP):
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        if not largest.sum(0).any():
            return []
        # nccl sends objects from the current device, which may be another rank's.
        with torch.accelerator.device_index(device.index):
            return gather_objects((value, beside()), group)


def broadcast_object(value: T, groups: Iterable[dist.ProcessGroup]) -> T:
    """Return the picklable `value` of the rank that is first in all `groups`, as `broadcast` does."""
    values = [value]
    for group in groups:
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(values, dist.get_global_rank(group, 0), group=group)
    return values[0]


def local_gradient(gradient: DTensor, leaf: Tensor) -> Tensor:
    """Return this rank's part of the `gradient` of the `DTensor` `leaf`, placed as that is.

    It may come with other placements: as Partial, say, if ranks of an axis had parts of the batch.
    """
    assert isinstance(leaf, DTensor)
    if gradient.placements != leaf.placements:
        gradient = gradient.redistribute(placements=leaf.placements)
    return gradient.to_local()


def full_tensor(tensor: DTensor) -> Tensor:
    """Return `tensor` in full, on the device of its mesh."""
    there: Any = tensor.to(tensor.device_mesh.device_type)  # annotated as a plain tensor
    full: Tensor = there.full_tensor()
    return full
