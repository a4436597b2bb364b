"""Public enums, policies and configs of the engine: frozen values. Imports torch_internals only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from lockstep.engine.torch_internals import BATCH_NORM


class ShardingStrategy(Enum):
    """The choice of what is sharded over the ranks, and of when unsharded parameters are freed."""

    FULL_SHARD = auto()
    """Shards everything; unsharded parameters exist during a unit's own forward and backward only."""
    SHARD_GRAD_OP = auto()
    """Shards everything; unsharded parameters are retained from a unit's forward until its backward."""
    NO_SHARD = auto()
    """Every rank holds everything; gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside each replica; gradients are averaged across replicas."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside each replica; gradients are averaged across replicas."""

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """The time at which backward gathers the group that it is expected to need next.

    The expected order is the reverse of that in which units ended their forwards. A wrong guess costs time.
    """

    BACKWARD_PRE = auto()
    """Before the current unit's gradients are computed: most overlap, at most three unsharded groups."""
    BACKWARD_POST = auto()
    """After the current unit is freed: less overlap, at most two unsharded groups."""


class GroupState(Enum):
    """The state of a group: what it has allocated, and what its modules see."""

    __hash__ = object.__hash__  # that of Enum is Python code, and a step looks up each state by it often

    SHARDED = auto()
    """Only the local shard exists; modules see it."""
    PREFETCHED = auto()
    """An all-gather for a unit that is expected next is in flight or done; modules see the local shard."""
    UNSHARDED = auto()
    """Unsharded parameters exist in the compute dtype; modules see them as plain tensors autograd tracks."""
    RETAINED = auto()
    """Unsharded parameters are retained for the coming backward; modules see the local shard."""
    SHARDED_POST_FORWARD = auto()
    """Parameters are resharded over a few ranks for the coming backward; modules see the local shard."""
    SUMMONED = auto()
    """Modules see unsharded original parameters in the original dtype, outside forward and backward."""


@dataclass(frozen=True)
class CPUOffload:
    """Offload of the wrapper. `offload_params`: keep shards, gradients and the optimizer's step on CPU."""

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes in which a unit computes and communicates.

    Attributes:
        param_dtype: Dtype of unsharded parameters and of their all-gather; None keeps the original dtype.
        reduce_dtype: Dtype in which gradients are reduced; None means `param_dtype`, then the original dtype.
        buffer_dtype: Dtype of floating-point buffers from the first forward on; `state_dict` returns the
            original one.
        keep_low_precision_grads: Leave gradients in the dtype in which they were reduced.
        cast_forward_inputs: Cast the unit's floating-point arguments to `param_dtype`. No effect on the root.
        cast_root_forward_inputs: The same for the root unit.
        _module_classes_to_ignore: Classes whose modules an auto wrap policy makes units in full precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BATCH_NORM,)

    def __post_init__(self) -> None:
        _check_dtypes(self, "param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which the group of one `fully_shard` or `replicate` computes and communicates.

    Buffers keep their dtype, and gradients get the dtype of their parameters.

    Attributes:
        param_dtype: As in `MixedPrecision`.
        reduce_dtype: As in `MixedPrecision`, where None means `param_dtype` first; in torch 2.15 it means the
            original dtype. Gradients are also accumulated in it.
        output_dtype: Dtype of floating-point results of the modules; None leaves them.
        cast_forward_inputs: Cast floating-point arguments to `param_dtype`, also inside dataclasses.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        _check_dtypes(self, "param_dtype", "reduce_dtype", "output_dtype")


def _check_dtypes(policy: object, *fields: str) -> None:
    """Raise ValueError for a field of `policy` that is neither None nor a floating-point dtype."""
    for field in fields:
        dtype = getattr(policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{type(policy).__name__}: {field} must be a floating-point torch.dtype, got {dtype!r}"
            )


@dataclass(frozen=True)
class OffloadPolicy:
    """No offload: shards stay on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and so the optimizer's step on CPU. torch's `pin_memory` has no effect here."""

    pin_memory: bool = True


@dataclass(frozen=True)
class GroupInfo:
    """Snapshot of one group, for tests and inspection.

    Attributes:
        name: The unit's name within the model, "" for the model itself.
        parameters: Names as in the unsharded model; tied parameters once.
        original_dtype: Dtype of the parameters outside forward and backward.
        compute_dtype: Dtype of the unsharded parameters.
        reduce_dtype: Dtype in which gradients are reduced.
        flat_dtype: Dtype of the local shard.
        gradient_dtype: Dtype of the gradients held now, None without any.
        post_backward_hooks: Hooks that wait for the gradient of each unsharded parameter; empty before the
            first all-gather.
        local_numel: Elements of the local shard, `padding` included.
        full_numel: Elements of all shards together, `padding` included.
        padding: Elements that make the shards of all ranks equal in size.
        local_bytes: Bytes of the local shard.
        gathered_bytes: Bytes of the unsharded parameters; 0 when they are freed.
        low_precision_bytes: Bytes of the cast copy of the local shard while an all-gather sends it, or 0.
    """

    name: str
    parameters: tuple[str, ...]
    state: GroupState
    sharding_strategy: ShardingStrategy
    original_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    flat_dtype: torch.dtype
    gradient_dtype: torch.dtype | None
    post_backward_hooks: tuple[int, ...]
    local_numel: int
    full_numel: int
    padding: int
    local_bytes: int
    gathered_bytes: int
    low_precision_bytes: int
    training: bool


class StateDictType(Enum):
    """The form in which `state_dict` and `optim_state_dict` return sharded tensors."""

    FULL_STATE_DICT = auto()
    """Unsharded tensors under original names; loads into any wrapping and into an unsharded model.

    Saving gathers group by group, and every rank gets the whole model unless a config limits it to rank 0.
    Loading a model communicates nothing, and needs memory for one unsharded group and those around it.
    """
    LOCAL_STATE_DICT = auto()
    """This rank's flat shard of each group; loads on the same rank, world size and wrapping only.

    Costs no communication and, for the model, no memory: the tensors are the live ones, as with an unsharded
    model. Save one file per rank, or the model through torch.distributed.checkpoint: shards are `DTensor`s,
    which it keeps apart. An optimizer's are plain tensors, and what it saves of them is refused.
    """
    SHARDED_STATE_DICT = auto()
    """`DTensor`s under original names, sharded along dim 0 as torch.chunk does; loads at any world size and
    wrapping through torch.distributed.checkpoint.

    Saving gathers group by group and keeps this rank's chunk; loading gathers parameter by parameter, and
    needs memory for two unsharded groups and those around. NO_SHARD and 0-dim parameters are replicated.
    """


@dataclass(frozen=True)
class StateDictConfig:
    """Options of the model's state dict. `offload_to_cpu`: move tensors to CPU, group by group."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """Options of FULL_STATE_DICT. `rank0_only`: other ranks take part, and get only what is outside of units.

    To load the dict, all ranks need it.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Options of LOCAL_STATE_DICT."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Options of SHARDED_STATE_DICT."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """Options of the optimizer's state dict. `offload_to_cpu`: move tensors to CPU, one after the other."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of FULL_STATE_DICT. `rank0_only`: others get an empty dict; loading reads rank 0's alone."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of LOCAL_STATE_DICT."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of SHARDED_STATE_DICT."""


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """The type of state dict, and its configs; raises TypeError for a config of another type."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        kind = self.state_dict_type
        if not isinstance(kind, StateDictType):
            raise TypeError(
                f"state_dict_type: expected a StateDictType of lockstep.engine, got {kind!r} of "
                f"{type(kind).__module__}."
            )
        fields = ("state_dict_config", "optim_state_dict_config")
        for field, expected in zip(fields, _CONFIGS[kind], strict=True):
            given = getattr(self, field)
            if type(given) is not expected:
                raise TypeError(
                    f"{field}: {kind.name} goes with {expected.__name__} of lockstep.engine, got "
                    f"{type(given).__name__} of {type(given).__module__}."
                )

    @classmethod
    def of(
        cls,
        kind: StateDictType,
        config: StateDictConfig | None = None,
        optim_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Return settings of `kind`, with its default configs in place of None."""
        default, optim_default = _CONFIGS.get(kind, (StateDictConfig, OptimStateDictConfig))
        return cls(kind, config or default(), optim_config or optim_default())

    @property
    def rank0_only(self) -> bool:
        return getattr(self.state_dict_config, "rank0_only", False)

    @property
    def optim_rank0_only(self) -> bool:
        return getattr(self.optim_state_dict_config, "rank0_only", False)
