"""Private names of torch for the precision of float32, with what to look for when they move. torch 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_OPERATORS = {"cuda": ("all", "matmul", "conv", "rnn"), "mkldnn": ("all", "matmul", "conv", "rnn")}
_PLACES = {"all": ("generic", "all")} | {
    f"{backend} {operator}": (backend, operator)
    for backend, operators in _OPERATORS.items()
    for operator in operators
}
# Two settings of old, which set some of those, and count beside them.
_OF_OLD: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn allow_tf32": (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
}


def float32_precision() -> dict[str, Any]:
    """Return the precision of float32 by backend and operator, and what is set in the ways of old.

    If it moves: what the properties `fp32_precision` of `torch.backends` read.
    """
    found = {name: torch._C._get_fp32_precision_getter(*place) for name, place in _PLACES.items()}
    for name, (get, _) in _OF_OLD.items():
        with contextlib.suppress(RuntimeError):  # torch refuses to say where both ways were used
            found[name] = get()
    return found


def set_float32_precision(precision: dict[str, Any]) -> None:
    """Set what `float32_precision` returned, where `torch.backends.disable_global_flags()` forbids it too."""
    for name, (_, set_to) in _OF_OLD.items():
        if name in precision:
            set_to(precision[name])
    for name, place in _PLACES.items():
        torch._C._set_fp32_precision_setter(*place, precision[name])
