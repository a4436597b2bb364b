"""Reductions of what ranks hand over: in rank order, half precision in fp32. Imports torch only.

The bits of a result depend on the contributions and their order alone: they are the same on every rank and in
every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.shm.signature import REDUCTIONS

__tracebackhide__ = True  # under pytest a failure points to the call

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(len(REDUCTIONS))

# The fp32 sum of so many elements stays in a core's L2 cache (256 KiB) until it is whole.
_CHUNK = 1 << 16

_OPERATIONS: dict[int, Callable[..., Tensor]] = {
    SUM: torch.add,
    AVG: torch.add,
    PREMUL_SUM: torch.add,
    PRODUCT: torch.mul,
    MIN: torch.minimum,
    MAX: torch.maximum,
    BAND: torch.bitwise_and,
    BOR: torch.bitwise_or,
    BXOR: torch.bitwise_xor,
}


def why_not(reduction: int, dtype: torch.dtype) -> str:
    """Return why elements of a dtype cannot be reduced so, or nothing."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return f"{dtype} is sent as bytes and cannot be reduced; reduce it in float16 or wider"
    bitwise = reduction in (BAND, BOR, BXOR)
    if bitwise and (dtype.is_floating_point or dtype.is_complex):
        return f"{REDUCTIONS[reduction]} needs integers or bool, not {dtype}"
    if dtype.is_complex and reduction in (MIN, MAX):
        return f"{REDUCTIONS[reduction]} has no meaning for {dtype}"
    if dtype == torch.bool and reduction in (AVG, PREMUL_SUM):
        return f"{REDUCTIONS[reduction]} needs numbers, not {dtype}"
    return ""


def reduce_into(out: Tensor, parts: Sequence[Tensor], reduction: int) -> None:
    """Reduce `parts`, in their order, into `out`, which may be one of them. All are 1-D, of one dtype."""
    dtype = out.dtype
    operation = _OPERATIONS[reduction]
    if len(parts) == 1:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
        return
    is_half = dtype in (torch.float16, torch.bfloat16)
    if len(parts) == 2 and reduction != AVG:
        # torch computes it in fp32 where the dtype is smaller, and rounds once.
        operation(parts[0], parts[1], out=out)
        return
    precise = torch.float32 if is_half else dtype
    for start in range(0, len(out), _CHUNK):
        pieces = [part[start : start + _CHUNK] for part in parts]
        total = torch.empty(len(pieces[0]), dtype=precise)
        operation(pieces[0].to(precise), pieces[1], out=total)
        for piece in pieces[2:]:
            operation(total, piece, out=total)
        if reduction == AVG:
            divide(total, len(parts))
        out[start : start + _CHUNK].copy_(total)


def divide(total: Tensor, by: float) -> None:
    """Divide in place; integers are rounded towards zero."""
    if total.is_floating_point() or total.is_complex():
        total.div_(by)
    else:
        total.div_(by, rounding_mode="trunc")
