"""The description of a collective call that ranks compare: operation, dtype, reduction, root, sizes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch

OPS = (
    "barrier",
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "monitored_barrier",
)
"""Operations by number, under torch's names."""

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""Reductions by number: torch's `ReduceOp.RedOpType`."""

DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
"""Dtypes by number, in an order that is the same for all ranks, as they have one version of torch."""

_HEAD = struct.Struct("<BBBBi")
_NONE = 255
_MAX_SIZES = 40  # more of them are compared by a digest
_op_number = {op: number for number, op in enumerate(OPS)}
_dtype_number = {dtype: number for number, dtype in enumerate(DTYPES)}
MAX_BYTES = _HEAD.size + 8 * _MAX_SIZES


@lru_cache(maxsize=4096)
def pack(
    op: str,
    dtype: torch.dtype | None = None,
    sizes: tuple[int, ...] = (),
    reduction: int = _NONE,
    root: int = -1,
) -> bytes:
    """Return the description as bytes that are equal on ranks with calls that fit together.

    Args:
        op: One of `OPS`.
        dtype: Type of the elements.
        sizes: Numbers of elements, the same on all ranks.
        reduction: Index into `REDUCTIONS`.
        root: Rank in the group, -1 for none.
    """
    number = _NONE if dtype is None else _dtype_number[dtype]
    if len(sizes) <= _MAX_SIZES:
        rest = struct.pack(f"<{len(sizes)}q", *sizes)
        return _HEAD.pack(_op_number[op], number, reduction, len(sizes), root) + rest
    digest = hashlib.sha256(repr(sizes).encode()).digest()
    return _HEAD.pack(_op_number[op], number, reduction, _NONE, root) + struct.pack("<q", sum(sizes)) + digest


def explain(packed: bytes) -> str:
    """Return what a rank called: `all_reduce (SUM) of 4 float32`."""
    op, dtype, reduction, count, root = _HEAD.unpack_from(packed)
    sizes: Sequence[int] = struct.unpack_from(f"<{1 if count == _NONE else count}q", packed, _HEAD.size)
    text = OPS[op]
    if reduction != _NONE:
        text += f" ({REDUCTIONS[reduction]})"
    if dtype != _NONE and not count:
        text += f" of {str(DTYPES[dtype]).removeprefix('torch.')}"
    elif dtype != _NONE:
        numbers = str(sizes[0]) if len(set(sizes)) == 1 else str(list(sizes))
        if count == _NONE:
            numbers += " elements in many tensors"
        elif count > 1:
            numbers = f"{count} tensors of {numbers}"
        text += f" of {numbers} {str(DTYPES[dtype]).removeprefix('torch.')}"
    if root >= 0:
        text += f" with root {root}"
    return text


def contents(packed: bytes) -> tuple[torch.dtype, int]:
    """Return dtype and number of elements of the one tensor of a call."""
    _, dtype, _, _, _ = _HEAD.unpack_from(packed)
    return DTYPES[dtype], struct.unpack_from("<q", packed, _HEAD.size)[0]
