"""Dtypes of a module's parameters, gradients and buffers. Inside a rank; no collectives: each fails alone."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

__tracebackhide__ = True  # under pytest a failure points to the call

# One dtype for all, or by pattern of the name: "*.bias", "layers.0.*"; the first that fits a name counts.
Expected = torch.dtype | Mapping[str, torch.dtype]


def assert_parameter_dtypes(module: nn.Module, expected: Expected) -> None:
    """Assert the dtype of each floating-point parameter, named as in `named_parameters()`.

    Args:
        module: looked at with all its children.
        expected: one dtype, or a dtype for each shell-style pattern of names, tried in order.

    Raises:
        AssertionError: lists each offender with its dtype and the expected one. Also if there is no
            floating-point parameter at all, if a pattern fits none, or if no pattern fits a parameter.
    """
    _check(dict(module.named_parameters()), expected, "parameter")


def assert_gradient_dtypes(module: nn.Module, expected: Expected) -> None:
    """Assert the dtype of each gradient, named as its parameter; parameters without one are ignored.

    Arguments and errors as in `assert_parameter_dtypes`: if no parameter has a gradient, it fails.
    """
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    _check(gradients, expected, "gradient")


def assert_buffer_dtypes(module: nn.Module, expected: Expected) -> None:
    """Assert the dtype of each floating-point buffer; integers (counters) are never cast and are ignored.

    Arguments and errors as in `assert_parameter_dtypes`.
    """
    _check(dict(module.named_buffers()), expected, "buffer")


def _check(tensors: Mapping[str, torch.Tensor], expected: Expected, kind: str) -> None:
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    if not dtypes:
        raise AssertionError(f"there is no floating-point {kind} to look at")
    patterns = {"*": expected} if isinstance(expected, torch.dtype) else expected
    fitting = {name: next((p for p in patterns if fnmatchcase(name, p)), None) for name in dtypes}
    found = [f"no {kind} is named like {p!r}" for p in patterns if p not in fitting.values()]
    for name, pattern in fitting.items():
        if pattern is None:
            found.append(f"{name} is {dtypes[name]}, and no pattern matches it")
        elif dtypes[name] != patterns[pattern]:
            found.append(f"{name} is {dtypes[name]}, expected {patterns[pattern]}")
    if found:
        raise AssertionError("\n".join([f"{kind} dtypes:", *found]))
