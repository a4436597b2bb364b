"""The engine's own work inside a transform of torch.func: it is on plain tensors. Imports torch only."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_transforms(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``function`` run as if no vmap, jvp or grad of torch.func were going on.

    Inside one, views of shards and of full parameters would be wrapped tensors without memory.
    """

    @wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return plain
