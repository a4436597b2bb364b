"""The one table of tolerances, and the comparison of named tensors by it. Inside a rank; imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

# A gradient may be None; so a mapping of gradients holds these.
Named = Mapping[str, torch.Tensor | None]


class Tolerance(NamedTuple):
    """Values agree where |actual - expected| <= atol + rtol * |expected|."""

    atol: float
    rtol: float


EXACT = Tolerance(0.0, 0.0)

# By the lowest precision in which the values were computed. A sharded sum adds the same numbers in another
# order, or divides before the sum and not after it, and so is off by units in the last place (eps): rtol
# counts these. Near zero, where terms of either sign cancel, they are units of the terms: atol allows for it.
TOLERANCES: Mapping[torch.dtype, Tolerance] = MappingProxyType(
    {
        torch.float64: Tolerance(1e-7, 1e-7),  # eps 2e-16; the loss often passes through float32 constants
        torch.float32: Tolerance(1e-5, 1.3e-6),  # eps 1.2e-7: 11 units
        torch.float16: Tolerance(1e-5, 1e-3),  # eps 9.8e-4: 1 unit
        torch.bfloat16: Tolerance(1e-5, 1.6e-2),  # eps 7.8e-3: 2 units
        # 1 unit, near zero too, where it is the smallest number.
        torch.float8_e4m3fn: Tolerance(2e-3, 0.125),
        torch.float8_e4m3fnuz: Tolerance(1e-3, 0.125),
        torch.float8_e5m2: Tolerance(2e-5, 0.25),
        torch.float8_e5m2fnuz: Tolerance(1e-5, 0.25),
    }
)
"""The largest difference of close values, by the lowest precision in which they were computed."""


def assert_named_close(
    actual: Named,
    expected: Named,
    tolerance: Tolerance | torch.dtype | None = None,
    *,
    same_dtype: bool = True,
) -> None:
    """Assert that two mappings hold the same names, and close tensors under each.

    Args:
        actual, expected: any shapes and dtypes; None (a missing gradient) equals None only.
        tolerance: a tolerance, or the dtype of a row of `TOLERANCES`; None takes the looser row of
            the two dtypes that are compared, and compares integers exactly.
        same_dtype: whether a difference in dtype is a failure.

    Raises:
        AssertionError: with a line for each name that differs: the largest absolute and relative difference
            and its index; also if there is no tensor to compare.
    """
    __tracebackhide__ = True
    if found := differences(actual, expected, tolerance, same_dtype=same_dtype):
        raise AssertionError("\n".join(found))


def differences(
    actual: Named,
    expected: Named,
    tolerance: Tolerance | torch.dtype | None = None,
    *,
    same_dtype: bool = True,
) -> list[str]:
    """Return one line for each name under which the two differ, as `assert_named_close` describes it."""
    if not any(tensor is not None for tensor in expected.values()):
        return ["there is no tensor to compare with"]
    found = [f"{name}: missing" for name in expected if name not in actual]
    found += [f"{name}: not expected" for name in actual if name not in expected]
    for name in expected:
        if name not in actual:
            continue
        difference = _difference(actual[name], expected[name], tolerance, same_dtype)
        found += [f"{name}: {difference}"] if difference else []
    return found


def _difference(
    actual: torch.Tensor | None,
    expected: torch.Tensor | None,
    tolerance: Tolerance | torch.dtype | None,
    same_dtype: bool,
) -> str | None:
    if actual is None or expected is None:
        return None if actual is expected else f"{_kind(actual)}, expected {_kind(expected)}"
    atol, rtol = _resolve(tolerance, actual.dtype, expected.dtype)
    if _is_surely_close(actual, expected, atol, rtol):
        return None
    if actual.dtype == expected.dtype or not same_dtype:
        actual, expected = _comparable(actual), _comparable(expected)
    try:
        torch.testing.assert_close(
            actual, expected, atol=atol, rtol=rtol, check_dtype=same_dtype, check_device=False
        )
    except AssertionError as error:
        # Its first line is only that the two differ.
        lines = [line.rstrip(".") for line in str(error).splitlines() if line]
        return "; ".join(lines[1:] or lines)
    return None


def _is_surely_close(actual: torch.Tensor, expected: torch.Tensor, atol: float, rtol: float) -> bool:
    """Return whether two plain tensors of one kind are close, as most are; `assert_close` takes longer."""
    if not type(actual) is type(expected) is torch.Tensor:
        return False
    is_low = actual.dtype == torch.complex32 or (actual.is_floating_point() and actual.dtype.itemsize == 1)
    if actual.is_meta or is_low or actual.layout is not torch.strided:  # `torch.equal` raises
        return False
    kinds = [(tensor.dtype, tensor.device, tensor.layout, tensor.shape) for tensor in (actual, expected)]
    if kinds[0] != kinds[1]:
        return False
    return torch.equal(actual, expected) or torch.allclose(actual, expected, rtol, atol)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return an 8-bit float as the same value in float32: torch compares 8-bit floats by their bits alone."""
    return tensor.float() if str(tensor.dtype).startswith("torch.float8_") else tensor


def _resolve(tolerance: Tolerance | torch.dtype | None, *dtypes: torch.dtype) -> Tolerance:
    if isinstance(tolerance, Tolerance):
        return tolerance
    rows = [_row(dtype) for dtype in ((tolerance,) if tolerance else dtypes)]
    return max(rows, key=lambda row: row.rtol)


def has_row(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype are compared without a tolerance that is passed."""
    return not (dtype.is_floating_point or dtype.is_complex) or _real(dtype) in TOLERANCES


def _row(dtype: torch.dtype) -> Tolerance:
    if not has_row(dtype):
        raise ValueError(f"TOLERANCES has no row for {dtype}: pass a Tolerance")
    return TOLERANCES.get(_real(dtype), EXACT)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor {list(tensor.shape)}"
