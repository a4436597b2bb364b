"""Values that tell ranks and elements apart, and whose sums are exact in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LOW = (torch.float16, torch.bfloat16)
REAL = (torch.float32, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
ONLY_SHM = (torch.int16, torch.complex64, torch.complex128, *F8)
"""Dtypes that gloo does not move, except where torch views them as another one."""

ALL = (*LOW, *REAL, *INTEGERS, torch.bool, *ONLY_SHM)


def sample(rank: int, dtype: torch.dtype = torch.float32, numel: int = 6) -> Tensor:
    """Return small whole numbers of which each rank has others."""
    values = (torch.arange(numel) * 3 + rank * 2 + 1) % 7
    if dtype is torch.bool:
        return values % 2 == 0
    if dtype.is_complex:
        return torch.complex(values.double(), values.double() + rank).to(dtype)
    return values.to(dtype)


def same(got: Tensor, expected: Tensor) -> bool:
    """Return whether dtype, shape and values are the same; float8 has no comparison of its own."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return False
    if got.dtype in F8:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(got, expected)
