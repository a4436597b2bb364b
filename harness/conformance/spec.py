"""What a suite asks of an engine, in words that fit every engine. Inside a rank; imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

__all__ = ["Precision", "ProcessGroups", "ShardSpec", "chosen_modules"]

# One group, or for hybrid sharding the pair (shard, replicate).
ProcessGroups = ProcessGroup | tuple[ProcessGroup, ProcessGroup]


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and communication; None keeps what the model has.

    ``param_dtype``: parameters in forward and backward, and their gather. ``reduce_dtype``: gradients on the
    wire; None means ``param_dtype``. ``buffer_dtype``: floating-point buffers. ``cast_forward_inputs``: units
    below the root cast their floating-point arguments to ``param_dtype``; ``cast_root_forward_inputs``: the
    root does. ``keep_low_precision_grads``: gradients stay in the dtype they were reduced in.
    ``full_precision_classes``: each module of these classes becomes a unit of its own that computes in full
    precision, whatever units are chosen; None leaves it to the engine, which does so with batch norms where
    a spec chooses units at all.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    full_precision_classes: tuple[type[nn.Module], ...] | None = None


@dataclass(frozen=True)
class ShardSpec:
    """How a model is to be sharded, in words that fit every engine.

    ``strategy``: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2. ``precision`` None
    does not name one to the engine at all. ``units``: submodules that gather and free on their own, by name
    within the model or by class; ``(nn.Module,)`` is all of them. ``min_num_params``, instead of ``units``:
    every submodule with at least so many elements in parameters that no unit below it has. ``ignored``:
    submodules that are neither sharded nor cast nor synchronised, chosen as ``units`` are. ``offload``:
    shards, gradients and the optimizer's step on CPU. ``use_orig_params``: the user sees the original
    parameters, not one flat parameter per group.
    ``backward_prefetch``: BACKWARD_PRE, BACKWARD_POST or None, and ``forward_prefetch``: whether a group is
    gathered before it is needed. ``sync_module_states``: all ranks start from rank 0's values. ``device``:
    where to compute; None is where the model is. ``process_group``: the ranks that share the model; for the
    two hybrid strategies a pair (shard, replicate), the ranks that this rank shares a replica with and those
    that hold the same shard as it. None is the default group, or for a pair what the engine makes of hosts.
    ``unit_groups``: the process groups of units that do not share the model's, by the units' names.
    ``unit_precisions``: likewise the precisions of units that do not have the model's.
    ``full_precision_in_eval``: whether precisions hold in training only; None leaves that to the environment.
    """

    strategy: str = "FULL_SHARD"
    precision: Precision | None = Precision()
    units: tuple[str | type[nn.Module], ...] = ()
    min_num_params: int | None = None
    ignored: tuple[str | type[nn.Module], ...] = ()
    offload: bool = False
    use_orig_params: bool = False
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    sync_module_states: bool = False
    device: torch.device | None = None
    process_group: ProcessGroups | None = None
    unit_groups: Mapping[str, ProcessGroups] = field(default_factory=dict)
    unit_precisions: Mapping[str, Precision] = field(default_factory=dict)
    full_precision_in_eval: bool | None = None


def chosen_modules(model: nn.Module, wanted: tuple[str | type[nn.Module], ...], what: str) -> set[nn.Module]:
    """Return the submodules that names and classes in ``wanted`` choose; ValueError for an unknown name."""
    modules = dict(model.named_modules())
    unknown = [name for name in wanted if isinstance(name, str) and name not in modules]
    if unknown:
        raise ValueError(
            f"ShardSpec: {what} {unknown} are not submodules of {type(model).__name__}; "
            f"it has {[name for name in modules if name]}"
        )
    classes = tuple(kind for kind in wanted if isinstance(kind, type))
    return {m for name, m in modules.items() if name in wanted or isinstance(m, classes)}
