"""Hooks on the steps of all optimizers of the process, while there are units. Runs on ranks."""

import inspect
import sys
import threading
from weakref import WeakSet, finalize

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lockstep.engine.marks import refuse_invalidated
from lockstep.engine.root import RootState
from lockstep.engine.torch_internals import untraced

# torch's hooks are global, so this is: one pair of hooks for all roots, registered with the first and removed
# with the last.
_ROOTS: WeakSet[RootState] = WeakSet()
_HANDLES: list[RemovableHandle] = []
# Where torch goes through the hooks, in the function that wraps `step`.
_TORCHS_FILE = inspect.getfile(Optimizer)


def watch(root: RootState) -> None:
    """Check the parameters of each optimizer that steps, and invalidate pinned ones of `root` after it.

    The foreach and fused kernels of optimizers change `DTensor`s without a trace in their versions.
    """
    _ROOTS.add(root)
    finalize(root, _unwatch).atexit = False
    if not _HANDLES:
        _HANDLES.append(register_optimizer_step_pre_hook(_refuse_misfits))
        _HANDLES.append(register_optimizer_step_post_hook(_invalidate))


def _unwatch() -> None:
    """Remove the hooks if no root is left, and if no optimizer is going through them now.

    The garbage collector may come here at any time, and in any thread: the main one may be going through the
    hooks then. Hooks that stay serve the next root, or do nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and next(iter(_ROOTS), None) is None and not _is_stepping():
        while _HANDLES:
            _HANDLES.pop().remove()


def _is_stepping() -> bool:
    # A frame that is kept, as by `traceback.walk_stack`, would hold the dropped model until a collection.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == _TORCHS_FILE:
            return True
    return False


def _optimized(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


@untraced
def _invalidate(optimizer: Optimizer, *_: object) -> None:
    stepped = _optimized(optimizer)
    for root in list(_ROOTS):
        root.invalidate(stepped)


@untraced
def _refuse_misfits(optimizer: Optimizer, *_: object) -> None:
    optimized = _optimized(optimizer)
    refuse_invalidated(optimized)
    if any(p.grad is not None and p.grad.shape != p.shape for p in optimized):
        raise RuntimeError(
            "the optimizer's gradients are full, and its parameters shards: no_sync left them unreduced. Run "
            "the last backward before the step outside no_sync."
        )
