"""Full original parameters between steps, for the user and for `state_dict`. Runs on ranks."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from harness.engine.group import ShardGroup
from harness.engine.hooks import Unit
from harness.engine.policy import GroupState
from harness.engine.shown_gradients import ShownGradients


@dataclass(frozen=True)
class Summon:
    """``writeback``: keep changes; ``rank0_only``: other ranks go on seeing shards; ``with_grads``: also
    gather gradients into `.grad`."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def __post_init__(self) -> None:
        if self.writeback and self.rank0_only:
            raise ValueError(
                "summon_full_params: writeback with rank0_only would change rank 0's shard alone; "
                "pass writeback=False."
            )


@contextmanager
def summoned(units: Iterable[Unit], options: Summon) -> Iterator[None]:
    """Let modules of ``units`` see full original parameters inside the context. A collective of all ranks."""
    groups = [unit.group for unit in units if unit.group]
    with ExitStack() as stack:
        for group in groups:
            _summon(group, options, stack)
        yield


def refuse_when_busy(units: Iterable[Unit], what: str) -> None:
    """Raise RuntimeError if a forward or backward is going on, or full parameters are summoned already."""
    for unit in units:
        if unit.tree.busy:
            raise RuntimeError(f"{what} is illegal inside forward and backward; call it between steps.")
        if unit.group and unit.group.state is GroupState.SUMMONED:
            raise RuntimeError(f"{what} is illegal inside summon_full_params; leave that context first.")


def _summon(group: ShardGroup, options: Summon, stack: ExitStack) -> None:
    full = group.full_original()
    gradients = None
    if options.with_grads:
        assert isinstance(group.gradients, ShownGradients)
        gradients = group.gradients.full()
    if options.rank0_only and not group.settings.axes.is_first:
        return
    if options.offload_to_cpu:
        cpu = torch.device("cpu")
        full = full.to(cpu)
        gradients = [g if g is None else g.to(cpu) for g in gradients] if gradients else None
    group.summon(full, gradients)
    stack.callback(group.dismiss, options.writeback)
