"""Private names of torch.multiprocessing. Seen in torch 2.13. Used in processes of tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def replace_parent_death_signal(request: Callable[[int], None]) -> None:
    """Let processes of `spawn` request otherwise the signal that the end of their parent sends.

    If it moves: what `_wrap` in `torch/multiprocessing/spawn.py` calls first.
    """
    for name in ("torch.multiprocessing", "torch.multiprocessing.spawn"):
        module: Any = sys.modules.get(name)
        if module is not None:
            module._prctl_pr_set_pdeathsig = request
