"""What units do when an optimizer steps, whichever it is. Runs on ranks."""

from weakref import finalize, ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from harness.engine.parameters import refuse_retired
from harness.engine.tree import Tree


def watch(tree: Tree, outdates: bool) -> None:
    """As long as ``tree`` lives refuse steps that mean nothing; with ``outdates`` see that others may.

    The foreach and fused kernels of optimizers change `DTensor`s without a trace in their versions: so full
    parameters of all groups are outdated after each step.
    """
    hooks = [register_optimizer_step_pre_hook(_refuse_misfits)]
    if outdates:
        alive = ref(tree)

        def outdate(*_: object) -> None:
            if stepped := alive():
                stepped.outdate()

        hooks.append(register_optimizer_step_post_hook(outdate))
    for hook in hooks:
        finalize(tree, hook.remove).atexit = False


def _refuse_misfits(optimizer: Optimizer, *_: object) -> None:
    optimized = [p for group in optimizer.param_groups for p in group["params"]]
    refuse_retired(optimized)
    if any(p.grad is not None and p.grad.shape != p.shape for p in optimized):
        raise RuntimeError(
            "the optimizer's gradients are full, and its parameters shards: no_sync left them unreduced. Run "
            "the last backward before the step outside no_sync."
        )
