"""The description of a sharded model, in words that fit every engine. Inside a rank; imports torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lockstep.conformance.capabilities import Capability

ProcessGroups = ProcessGroup | tuple[ProcessGroup, ProcessGroup]
"""One group, or for hybrid sharding the pair (shard, replicate)."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and communication; None keeps what the model has.

    Attributes:
        param_dtype: dtype of parameters in forward and backward, and of their all-gather.
        reduce_dtype: dtype of gradients while they are reduced; None means `param_dtype`.
        buffer_dtype: dtype of floating-point buffers.
        keep_low_precision_grads: gradients stay in the dtype they were reduced in.
        cast_forward_inputs: units below the root cast their floating-point arguments to `param_dtype`.
        cast_root_forward_inputs: the root does.
        full_precision_classes: each module of these classes becomes a unit of its own that computes in full
            precision, whatever units are chosen; None leaves it to the engine, which takes batch norms
            where a spec chooses units at all.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    full_precision_classes: tuple[type[nn.Module], ...] | None = None

    @property
    def reduction_dtype(self) -> torch.dtype | None:
        """The dtype of gradients while they are reduced; None if they have that of their parameters.

        For policies of torch 2.15, where `fully_shard` without `reduce_dtype` leaves out `param_dtype`.
        """
        return self.reduce_dtype or self.param_dtype


@dataclass(frozen=True)
class ShardSpec:
    """A description of a sharded model, in words that fit every engine.

    Attributes:
        strategy: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2.
        precision: None does not pass one to the engine at all.
        units: submodules that unshard and reshard on their own, by name within the model or by class;
            `(nn.Module,)` is all of them.
        min_num_params: instead of `units`, every submodule with at least so many elements in parameters that
            no unit below it has.
        ignored: submodules that are neither sharded nor cast nor synchronised, chosen as `units` are.
        offload: shards, gradients and the optimizer's step on CPU.
        use_orig_params: the user sees the original parameters, not one flat parameter per group.
        backward_prefetch: BACKWARD_PRE, BACKWARD_POST or None.
        forward_prefetch: whether forward unshards a group before it is needed.
        sync_module_states: all ranks start from rank 0's values.
        device: where to compute; None is where the model is.
        process_group: the ranks that share the model; for the two hybrid strategies a pair (shard,
            replicate), the ranks that this rank shares a replica with and those that hold the same shard as
            it. None is the default group, or for a pair what the engine makes of hosts.
        unit_groups: process groups of units that do not share the model's, by the units' names.
        unit_precisions: precisions of units that do not have the model's, likewise.
        full_precision_in_eval: whether precisions hold in training only; None leaves that to the environment.
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
    """Return the submodules that names and classes in `wanted` choose; ValueError for an unknown name."""
    modules = dict(model.named_modules())
    unknown = [name for name in wanted if isinstance(name, str) and name not in modules]
    if unknown:
        raise ValueError(
            f"ShardSpec: {what} {unknown} are not submodules of {type(model).__name__}; "
            f"it has {[name for name in modules if name]}"
        )
    classes = tuple(kind for kind in wanted if isinstance(kind, type))
    return {m for name, m in modules.items() if name in wanted or isinstance(m, classes)}


def required_capabilities(spec: ShardSpec) -> Iterator[Capability]:
    """Yield what an engine must offer for a spec, beyond one plain group."""
    hybrid = "HYBRID" in spec.strategy
    required = {
        Capability.SHARDING: spec.strategy != "NO_SHARD",
        Capability.REPLICATION: spec.strategy == "NO_SHARD",
        Capability.HYBRID: hybrid,
        Capability.HYBRID_BY_HOSTS: hybrid and not isinstance(spec.process_group, tuple),
        Capability.OFFLOAD: spec.offload,
        Capability.UNIT_GROUPS: bool(spec.unit_groups),
        Capability.UNITS_BY_SIZE: spec.min_num_params is not None,
        Capability.UNIT_PRECISIONS: bool(spec.unit_precisions),
        Capability.PRECISION_IN_EVAL: spec.full_precision_in_eval is not None,
        Capability.PREFETCH: spec.backward_prefetch == "BACKWARD_POST" or spec.forward_prefetch,
        Capability.SYNC_STATES: spec.sync_module_states,
    }
    yield from (capability for capability, is_required in required.items() if is_required)
    for precision in filter(None, (spec.precision, *spec.unit_precisions.values())):
        if precision.param_dtype or precision.reduce_dtype or precision.buffer_dtype:
            yield Capability.MIXED_PRECISION
        if precision.buffer_dtype:
            yield Capability.BUFFER_DTYPE
        if precision.keep_low_precision_grads:
            yield Capability.KEPT_LOW_PRECISION
