"""Equality as torch's `TestCase.assertEqual` has it: close numbers and tensors, equal everything else.

Inside a rank; imports torch. No collectives: each rank fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.assertions.closeness import EXACT, TOLERANCES, Tolerance
from lockstep.recorders.tensors import is_dtensor

_SEQUENCES = (Sequence, nn.Sequential, nn.ModuleList, nn.ParameterList)
_MAPPINGS = (Mapping, nn.ModuleDict, nn.ParameterDict)
_ARRAYS = (torch.Tensor, np.ndarray)
_NUMBERS = (int, float, complex, np.number)


@dataclass(frozen=True)
class _Rules:
    """The options of one comparison, as `assert_close` takes them."""

    rtol: float | None
    atol: float | None
    equal_nan: bool
    check_dtype: bool
    check_device: bool
    check_stride: bool


def assert_equal(
    actual: Any,
    expected: Any,
    msg: str | Callable[[str], str] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = True,
    exact_dtype: bool = True,
    exact_device: bool = False,
    exact_stride: bool = False,
) -> None:
    """Assert that two values are equal by the rules of torch's `TestCase.assertEqual`.

    Sequences and mappings are compared element by element, whatever their types. Two tensors (or arrays)
    must be close, NaN equal to NaN, with the same dtype, on any devices; so must a tensor and a sequence of
    numbers. A number equals another one, or a tensor of one element, that is close: floats as float32,
    integers exactly. A boolean is compared by truth. Everything else is compared by `==`.

    Args:
        actual, expected: the values, of any types.
        msg: text of a failure behind the difference, or a function that makes its text of the difference's.
        rtol, atol: give both or none; by default those of `torch.testing.assert_close` for the dtypes.
        equal_nan: whether NaN equals NaN.
        exact_dtype, exact_device, exact_stride: whether a difference of two tensors in it is a failure.

    Raises:
        AssertionError: the first difference, and where it is in nested containers.
        ValueError: one of `rtol` and `atol` is given without the other.
        TypeError: one value is a DTensor and the other is none.
    """
    __tracebackhide__ = True
    if (rtol is None) != (atol is None):
        raise ValueError("assert_equal: give both rtol and atol, or neither")
    rules = _Rules(rtol, atol, equal_nan, exact_dtype, exact_device, exact_stride)
    difference = _difference(actual, expected, rules, "")
    if difference is not None:
        text = msg(difference) if callable(msg) else "\n".join(filter(None, (difference, msg)))
        raise AssertionError(text)


def _difference(actual: Any, expected: Any, rules: _Rules, where: str) -> str | None:
    """Return how two values differ, or None."""
    actual, expected = _alike(actual, expected)
    at = f"at {where}: " if where else ""
    if isinstance(actual, _MAPPINGS) and isinstance(expected, _MAPPINGS):
        return _difference_of_mappings(actual, expected, rules, where)
    if _is_sequence(actual) and _is_sequence(expected):
        if len(actual) != len(expected):
            return f"{at}lengths differ: {len(actual)} and {len(expected)}"
        pairs = enumerate(zip(actual, expected, strict=True))
        found = (_difference(one, other, rules, f"{where}[{index}]") for index, (one, other) in pairs)
        return next(filter(None, found), None)
    if isinstance(actual, _ARRAYS) and isinstance(expected, _ARRAYS):
        return _difference_of_tensors(actual, expected, rules, at)
    if {type(actual), type(expected)} & {bool, np.bool_} and _is_scalar(actual) and _is_scalar(expected):
        equal = bool(_number(actual)) is bool(_number(expected))
    elif _is_scalar(actual) and _is_scalar(expected):
        equal = _close(_number(actual), _number(expected), rules)
    elif isinstance(actual, _ARRAYS) or isinstance(expected, _ARRAYS):
        equal = False  # `==` would compare each element
    else:
        equal = bool(actual == expected)
    return None if equal else f"{at}{actual!r} is not equal to {expected!r}"


def _alike(actual: Any, expected: Any) -> tuple[Any, Any]:
    """Turn a sequence that is compared with a tensor into a tensor; take the local parts of two DTensors."""
    if is_dtensor(actual) != is_dtensor(expected):
        raise TypeError("assert_equal: a DTensor and another value: compare its full_tensor() or to_local()")
    if is_dtensor(actual) and is_dtensor(expected):
        for one, other in (
            (actual.placements, expected.placements),
            (actual.device_mesh, expected.device_mesh),
        ):
            if one != other:
                raise AssertionError(f"DTensors differ: {one} and {other}")
        return actual.to_local(), expected.to_local()
    if isinstance(actual, torch.Tensor) and _is_sequence(expected):
        return actual, torch.as_tensor(expected, dtype=actual.dtype, device=actual.device)
    if isinstance(expected, torch.Tensor) and _is_sequence(actual):
        return torch.as_tensor(actual, dtype=expected.dtype, device=expected.device), expected
    return actual, expected


def _difference_of_mappings(actual: Any, expected: Any, rules: _Rules, where: str) -> str | None:
    ours, theirs = list(actual.keys()), list(expected.keys())
    if set(ours) != set(theirs):
        missing = [key for key in theirs if key not in actual]
        more = [key for key in ours if key not in expected]
        return f"{f'at {where}: ' if where else ''}keys differ: {missing} missing, {more} not expected"
    found = (_difference(actual[key], expected[key], rules, f"{where}[{key!r}]") for key in ours)
    return next(filter(None, found), None)


def _difference_of_tensors(actual: Any, expected: Any, rules: _Rules, at: str) -> str | None:
    one, other = (torch.as_tensor(value) for value in (actual, expected))
    try:
        torch.testing.assert_close(
            one,
            other,
            rtol=rules.rtol,
            atol=rules.atol,
            equal_nan=rules.equal_nan,
            check_dtype=rules.check_dtype,
            check_device=rules.check_device,
            check_stride=rules.check_stride,
            check_layout=False,
        )
    except AssertionError as error:
        return f"{at}{error}"
    return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, _SEQUENCES) and not isinstance(value, str | bytes)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a number, or a tensor or an array that holds exactly one."""
    if isinstance(value, _ARRAYS):
        return (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
    return isinstance(value, (*_NUMBERS, np.bool_))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, (*_ARRAYS, np.number, np.bool_)) else value


def _close(actual: complex, expected: complex, rules: _Rules) -> bool:
    if actual == expected:
        return True
    if actual != actual and expected != expected:
        return rules.equal_nan
    inexact = any(isinstance(value, float | complex) for value in (actual, expected))
    tolerance = TOLERANCES[torch.float32] if inexact else EXACT
    if rules.rtol is not None and rules.atol is not None:
        tolerance = Tolerance(rules.atol, rules.rtol)
    difference = abs(actual - expected)
    return difference <= tolerance.atol + tolerance.rtol * abs(expected) < float("inf")
