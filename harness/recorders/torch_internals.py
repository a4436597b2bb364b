"""Private names of torch that the logs use, each with what to look for when it moves. Seen in torch 2.13."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

# No public module exports the dispatch mode; torch documents it at this address.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "group_of", "in_backward"]


def in_backward() -> bool:
    """Return whether autograd runs on this thread. If it moves: `torch.utils.checkpoint` tests the same."""
    return torch._C._current_graph_task_id() != -1


def group_of(argument: Any) -> dist.ProcessGroup:
    """Return the process group that an operator of the dispatcher was given: as a name, boxed or as it is."""
    if isinstance(argument, str):  # by the functional collectives; torch has no public way back from a name
        return _resolve_process_group(argument)  # type: ignore[arg-type]  # a NewType of str
    return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)
