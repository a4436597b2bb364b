"""Private names of torch that the logs use, each with what to look for when it moves. Seen in torch 2.13."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group

# No public module exports the dispatch mode, which torch documents at this address, nor `FakeTensor`.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "COMPILED",
    "FakeTensor",
    "TorchDispatchMode",
    "caller_of_operator",
    "group_of",
    "in_backward",
    "is_view",
    "untraced",
    "work_of",
    "written_arguments",
]


F = TypeVar("F", bound=Callable[..., Any])

COMPILED = "_orig_mod."
"""Part of the names below a module that `torch.compile(module)` returned. If it moves: the attribute of
`torch._dynamo.OptimizedModule` that has the module."""


def untraced(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls.

    `torch.compiler.disable` imports the compiler, which takes 0.4 s, and then adds to each call. If it moves:
    what that uses.
    """
    action = torch._C._dynamo.eval_frame._FrameAction
    skip = torch._C._dynamo.eval_frame._FrameExecStrategy(action.SKIP, action.SKIP)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, skip)
    return function


def in_backward() -> bool:
    """Return whether autograd runs on this thread. If it moves: `torch.utils.checkpoint` tests the same."""
    return torch._C._current_graph_task_id() != -1


def group_of(argument: Any) -> dist.ProcessGroup:
    """Return the process group that an operator of the dispatcher was given: as a name, boxed or as it is."""
    if isinstance(argument, str):  # by the functional collectives; torch has no public way back from a name
        return _resolve_process_group(argument)  # type: ignore[arg-type]  # a NewType of str
    return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)


def caller_of_operator() -> str:
    """Return "torch" if the running collective was begun by C++ code of torch, such as DDP's reducer.

    It is "user" if Python code began it, through the functions of torch.distributed or methods of a group.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_OF_DISPATCH):
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return "torch" if "/torch/" in file and not file.endswith(_OF_COLLECTIVES) else "user"


# Frames between an operator and who called it, and the files of torch's own collectives. If one moves: print
# the stack in `__torch_dispatch__` during `dist.all_reduce`.
_OF_DISPATCH = (
    "lockstep/recorders/execution.py",
    "torch/_ops.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "torch/utils/_python_dispatch.py",
)
_OF_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


def work_of(returned: Any) -> dist.Work | None:
    """Return the handle among what an operator of a collective returned; the one that its caller gets.

    If it moves: pybind finds the object that it made for a C++ object before, as long as that lives.
    """
    for value in returned if isinstance(returned, tuple | list) else (returned,):
        if isinstance(value, torch.ScriptObject):
            work: dist.Work = dist.Work.unbox(value)
            return work
    return None


def is_view(func: Any) -> bool:
    """Return whether an operator only looks at the memory of its input in another way."""
    return bool(getattr(func, "is_view", False))


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to, by its schema."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value] if value is not None else []
    return found
