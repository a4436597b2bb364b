"""Private names of torch for seeds and float32 precision; what to look for when they move. torch 2.13."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import torch

_OPERATORS = {"cuda": ("all", "matmul", "conv", "rnn"), "mkldnn": ("all", "matmul", "conv", "rnn")}
_PLACES = {"all": ("generic", "all")} | {
    f"{backend} {operator}": (backend, operator)
    for backend, operators in _OPERATORS.items()
    for operator in operators
}
# Two older settings with their defaults, which set some of those, and count beside them.
_LEGACY: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Any]] = {
    "float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "highest",
    ),
    "cudnn allow_tf32": (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32, True),
}


def float32_precision() -> dict[str, Any]:
    """Return the precision of float32 by backend and operator, and the older settings of it.

    If it moves: what the properties `fp32_precision` of `torch.backends` read.
    """
    found: dict[str, Any] = {name: torch._C._get_fp32_precision_getter(*at) for name, at in _PLACES.items()}
    for name, (get, _, _) in _LEGACY.items():
        with contextlib.suppress(RuntimeError):  # torch refuses to say where both ways were used
            found[name] = get()
    return found


def set_float32_precision(precision: dict[str, Any]) -> None:
    """Set what `float32_precision` returned, where `torch.backends.disable_global_flags()` forbids it too.

    What is there is what an operator has of its backend, or of all, unless it is set itself: parents come
    first, and what is right then stays unset.
    """
    now = float32_precision()
    for name, (_, set_to, default) in _LEGACY.items():
        if now.get(name) != precision.get(name):
            set_to(precision.get(name, default))
    for name, place in _PLACES.items():
        for value in ("none", precision[name]):
            if torch._C._get_fp32_precision_getter(*place) != precision[name]:
                torch._C._set_fp32_precision_setter(*place, value)


class _LateStack:
    """The lines of `traceback.format_stack`, which are read and formatted when they are needed."""

    def __init__(self, frame: FrameType) -> None:
        frames = [
            (each.f_code.co_filename, line, each.f_code.co_name, None)
            for each, line in traceback.walk_stack(frame)
        ]
        self._frames = frames[::-1]

    def __iter__(self) -> Iterator[str]:
        return iter(traceback.format_list(self._frames))


def format_stacks_late() -> None:
    """Let `torch.manual_seed` remember where it was called, and read no file for it.

    It queues a seed for each kind of device that was never used, with the lines of the stack, which is deep
    under pytest. If it moves: what `torch.cuda._lazy_call` formats.
    """
    late = SimpleNamespace(**{**vars(traceback), "format_stack": lambda: _LateStack(sys._getframe(1))})
    for module in (torch.cuda, torch.mtia, torch.xpu):
        module.traceback = late  # type: ignore[attr-defined]
