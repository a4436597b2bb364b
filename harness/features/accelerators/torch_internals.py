"""Private names of torch for the precision of float32, with what to look for when they move. torch 2.13."""

from __future__ import annotations

import contextlib

import torch

_OPERATORS = {"cuda": ("all", "matmul", "conv", "rnn"), "mkldnn": ("all", "matmul", "conv", "rnn")}
_PLACES = {"all": ("generic", "all")} | {
    f"{backend} {operator}": (backend, operator)
    for backend, operators in _OPERATORS.items()
    for operator in operators
}
_MATMUL = "float32_matmul_precision"


def float32_precision() -> dict[str, str]:
    """Return the precision of float32 by backend and operator, and that of `set_float32_matmul_precision`.

    If it moves: what the properties `fp32_precision` of `torch.backends` read.
    """
    found = {name: torch._C._get_fp32_precision_getter(*place) for name, place in _PLACES.items()}
    with contextlib.suppress(RuntimeError):  # torch refuses to say where both ways of setting it were used
        found[_MATMUL] = torch.get_float32_matmul_precision()
    return found


def set_float32_precision(precision: dict[str, str]) -> None:
    """Set what `float32_precision` returned, where `torch.backends.disable_global_flags()` forbids it too."""
    if _MATMUL in precision:  # first, as it sets some of the others
        torch.set_float32_matmul_precision(precision[_MATMUL])
    for name, place in _PLACES.items():
        torch._C._set_fp32_precision_setter(*place, precision[name])
