"""What is done when an optimizer steps, whichever it is. Runs on ranks."""

from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.engine.param import refuse_invalidated
from harness.engine.root import RootState

# One hook for all trees: to remove a hook when its tree dies, which may be at any time, would change torch's
# list of hooks while an optimizer goes through it.
_WATCHING: WeakSet[RootState] = WeakSet()


def watch(tree: RootState) -> None:
    """Outdate full parameters of ``tree`` whenever an optimizer steps shards of them, as long as it lives.

    The foreach and fused kernels of optimizers change `DTensor`s without a trace in their versions.
    """
    _WATCHING.add(tree)


def _optimized(optimizer: Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}


def _outdate(optimizer: Optimizer, *_: object) -> None:
    stepped = _optimized(optimizer)
    for tree in list(_WATCHING):
        tree.outdate(stepped)


def _refuse_misfits(optimizer: Optimizer, *_: object) -> None:
    optimized = _optimized(optimizer)
    refuse_invalidated(optimized)
    if any(p.grad is not None and p.grad.shape != p.shape for p in optimized):
        raise RuntimeError(
            "the optimizer's gradients are full, and its parameters shards: no_sync left them unreduced. Run "
            "the last backward before the step outside no_sync."
        )


register_optimizer_step_pre_hook(_refuse_misfits)
register_optimizer_step_post_hook(_outdate)
