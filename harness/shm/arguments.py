"""Checks of what a collective is called with, before anything is sent. Imports torch only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.shm.reduce import PREMUL_SUM, why_not
from lockstep.shm.signature import REDUCTIONS

__tracebackhide__ = True  # under pytest a failure points to the call

_NUMBERS = {getattr(dist.ReduceOp.RedOpType, name): number for number, name in enumerate(REDUCTIONS)}


def check_tensors(
    op: str, tensors: Iterable[Tensor], dtype: torch.dtype, filled: Iterable[Tensor] = ()
) -> None:
    """Raise ValueError unless all are plain CPU tensors of one dtype, and those to fill do not overlap."""
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.layout is torch.strided and tensor.dtype is dtype):
            if not tensor.is_cpu:
                where = f"on device {tensor.device}"
                raise ValueError(
                    f"{op}: backend shm is for CPU tensors, and one is {where}; use nccl or gloo"
                )
            if tensor.layout is not torch.strided:
                raise ValueError(f"{op}: backend shm is for dense tensors, and one is {tensor.layout}")
            raise ValueError(f"{op}: its tensors have different dtypes, {dtype} and {tensor.dtype}")
        if tensor.is_conj() or tensor.is_neg():  # its memory has other values than it has
            raise ValueError(
                f"{op}: a tensor is a conjugated or negated view; call .resolve_conj().resolve_neg() on it"
            )
    for output in filled:
        if not output.is_contiguous() and 0 in output.stride() and output.numel() > 1:
            sizes = zip(output.shape, output.stride(), strict=True)
            if any(size > 1 and not stride for size, stride in sizes):
                raise ValueError(
                    f"{op}: an output of shape {tuple(output.shape)} is expanded: its elements overlap in "
                    "memory; call .contiguous() on it first"
                )


def check_numel(op: str, whole: Tensor, piece: Tensor, size: int) -> None:
    """Raise ValueError unless `whole` has the elements of `size` pieces."""
    if whole.numel() != piece.numel() * size:
        if size == 1:
            raise ValueError(f"{op}: an output of {whole.numel()} elements, for an input of {piece.numel()}")
        raise ValueError(
            f"{op}: a tensor of {whole.numel()} elements is not {size} times one of {piece.numel()}, "
            f"as it must be for {size} ranks"
        )


def check_length(op: str, tensors: Sequence[Tensor], size: int) -> None:
    """Raise ValueError unless a list has a tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{op}: a list of {len(tensors)} tensors, for a group of {size} ranks")


def check_root(op: str, root: int, size: int) -> None:
    """Raise ValueError unless `root` is a rank of the group."""
    if not 0 <= root < size:
        raise ValueError(f"{op}: root {root} is no rank of a group of {size} ranks")


def check_splits(tensor: Tensor, splits: Sequence[int], size: int) -> None:
    """Raise ValueError unless the rows of `tensor` can be split so, or equally where there are no splits."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(
                f"all_to_all_single: {rows} rows cannot be split into {size} equal parts; give split sizes"
            )
    elif len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"all_to_all_single: split sizes {list(splits)} for {rows} rows and {size} ranks")


def reduction_of(op: str, opts: Any, dtype: torch.dtype) -> int:
    """Return the number of the reduction that options ask for; a sum where there are none.

    Raises:
        ValueError: elements of this dtype cannot be reduced so.
    """
    chosen = getattr(opts, "reduceOp", opts)
    number = 0 if chosen is None else _NUMBERS[getattr(chosen, "op", chosen)]
    if problem := why_not(number, dtype):
        raise ValueError(f"{op}: {problem}")
    return number


def premultiplied(opts: Any, reduction: int, tensor: Tensor) -> Tensor:
    """Return what a tensor adds to the reduction: multiplied by the factor of PREMUL_SUM."""
    if reduction != PREMUL_SUM:
        return tensor
    factor: float | Tensor = opts.reduceOp.__getstate__()[1]  # torch 2.11 has no attribute for it
    return (tensor * factor).to(tensor.dtype)
