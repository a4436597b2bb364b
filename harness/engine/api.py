"""Public enums, policies and configs of the engine: frozen values without behaviour. Imports torch only."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class ShardingStrategy(Enum):
    """Say what is cut over the ranks and when full parameters are given up."""

    FULL_SHARD = auto()
    """Shards everything; full parameters exist during a unit's own forward and backward only."""
    SHARD_GRAD_OP = auto()
    """Shards everything; full parameters are kept from a unit's forward until its backward."""
    NO_SHARD = auto()
    """Every rank holds everything; gradients are averaged."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside each replica, the replicas' gradients averaged."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside each replica, the replicas' gradients averaged."""

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

    @property
    def frees_after_forward(self) -> bool:
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """Say when backward gathers the group that it is expected to need next.

    The guess is the reverse of the order in which units ended their forwards. A wrong one costs time.
    """

    BACKWARD_PRE = auto()
    """Before the gradients of the current unit are computed: the most overlap, three full groups at most."""
    BACKWARD_POST = auto()
    """After they are computed and the current unit is freed: less overlap, two full groups at most."""


class GroupState(Enum):
    """Say what a group has allocated and what its modules see."""

    SHARDED = auto()
    """Only the local shard exists; modules see it."""
    PREFETCHED = auto()
    """Full parameters are on their way to a unit that is expected next; modules see the local shard."""
    GATHERED = auto()
    """Full parameters exist in the compute dtype; modules see them as plain tensors autograd tracks."""
    KEPT = auto()
    """Full parameters exist for the coming backward; modules see the local shard."""
    SPLIT = auto()
    """Full parameters for the coming backward are cut over a few ranks; modules see the local shard."""
    SUMMONED = auto()
    """Modules see full original parameters in the original dtype, outside forward and backward."""


@dataclass(frozen=True)
class CPUOffload:
    """Keep shards, gradients and so the optimizer's step on CPU if ``offload_params``."""

    offload_params: bool = False


@dataclass(frozen=True)
class MixedPrecision:
    """Say in which dtypes a unit computes and communicates.

    ``param_dtype``: gathered parameters, and the gather itself; None keeps the original dtype.
    ``reduce_dtype``: gradients on the wire; None means ``param_dtype``, then the original dtype.
    ``buffer_dtype``: floating-point buffers, cast at the first forward; ``state_dict`` shows originals.
    ``keep_low_precision_grads``: leave gradients in the dtype they were reduced in.
    ``cast_forward_inputs``: this unit casts its floating-point arguments to ``param_dtype``.
    ``cast_root_forward_inputs``: the same for the root unit, where the previous field has no effect.
    ``_module_classes_to_ignore``: an auto wrap policy makes each module of these classes a unit of its own
    that computes in full precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)

    def __post_init__(self) -> None:
        check_dtypes(self, "param_dtype", "reduce_dtype", "buffer_dtype")


def check_dtypes(policy: object, *fields: str) -> None:
    """Raise ValueError for a field of ``policy`` that is neither None nor a floating-point dtype."""
    for field in fields:
        dtype = getattr(policy, field)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{type(policy).__name__}: {field} must be a floating-point torch.dtype, got {dtype!r}"
            )


@dataclass(frozen=True)
class GroupInfo:
    """Show one group as it is now: a snapshot for tests and curious users.

    ``name``: the unit's name within the model, ``""`` for the model itself. ``parameters``: names as in the
    unsharded model; tied ones once. ``original_dtype``: what the user sees outside forward and backward;
    ``flat_dtype``: of the flat local shard; ``gradient_dtype``: of the gradients held now, None if none are.
    ``post_backward_hooks``: how many hooks await the gradient of each full parameter; empty before the first
    gather.
    ``local_numel``, ``full_numel``: elements of the local shard, and of all shards together; both count
    ``padding``. ``local_bytes``: of the local shard; ``gathered_bytes``: of the full parameters allocated
    now, 0 when they are freed; ``low_precision_bytes``: of the local shard's copy that is cast to be sent in
    a gather, 0 when the gather has arrived, and always where nothing is cast or nothing is sent.
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


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Say in which dtypes the group of one `fully_shard` or `replicate` computes and communicates.

    ``param_dtype``: full parameters, and their gather; None keeps the original dtype. ``reduce_dtype``:
    gradients on the wire, and those that wait for it; None means ``param_dtype``, then the original dtype.
    ``output_dtype``: floating-point results of the modules; None leaves them. ``cast_forward_inputs``: cast
    floating-point arguments to ``param_dtype``, inside containers and dataclasses too. Buffers stay as they
    are, and gradients are given in the parameters' dtype.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        check_dtypes(self, "param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards where they compute."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and so the optimizer's step on CPU.

    ``pin_memory`` is accepted for torch's sake and changes nothing: shards are in pageable memory.
    """

    pin_memory: bool = True


class StateDictType(Enum):
    """Say in which form `state_dict` and `optim_state_dict` return what is sharded."""

    FULL_STATE_DICT = auto()
    """Full tensors under original names, as an unsharded model has them; loads onto anything.

    Saving gathers group by group. Unless a config says otherwise every rank ends up with the whole model.
    Loading a model communicates nothing, and needs memory for one full group and those around it.
    """
    LOCAL_STATE_DICT = auto()
    """This rank's flat shard of each group; loads on the same rank, world size and wrapping only.

    Costs no communication, and for the model no memory: tensors are the live ones, as with an unsharded
    model. Save each rank's to a file of its own; torch.distributed.checkpoint would take them for copies of
    one another.
    """
    SHARDED_STATE_DICT = auto()
    """`DTensor`s under original names, cut along dim 0 as torch.chunk cuts; through
    torch.distributed.checkpoint they load at any world size and wrapping.

    Saving gathers group by group and keeps this rank's part; loading gathers parameter by parameter, and
    needs memory for two full groups and those around. Parameters that are on every rank anyway (NO_SHARD,
    0-dim) are replicated.
    """


@dataclass(frozen=True)
class StateDictConfig:
    """``offload_to_cpu``: tensors are moved to CPU, group by group."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict, but for what lies outside any unit.

    Loading wants the dict on every rank.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Nothing of its own."""


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Nothing of its own."""


@dataclass(frozen=True)
class OptimStateDictConfig:
    """``offload_to_cpu``: tensors are moved to CPU, one kind of state of one group at a time."""

    offload_to_cpu: bool = True


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """``rank0_only``: other ranks take part and get an empty dict; loading reads rank 0's alone."""

    rank0_only: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Nothing of its own."""

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Nothing of its own."""


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass(frozen=True)
class StateDictSettings:
    """The kind of state dict, and its configs for the model and the optimizer.

    Raises TypeError for a config of another kind.
    """

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig

    def __post_init__(self) -> None:
        _check_kind(self.state_dict_type)
        for field, wanted in zip(
            ("state_dict_config", "optim_state_dict_config"), _CONFIGS[self.state_dict_type], strict=True
        ):
            given = getattr(self, field)
            if type(given) is not wanted:
                raise TypeError(
                    f"{field}: {self.state_dict_type.name} goes with {wanted.__name__} of "
                    f"harness.engine, got {type(given).__name__} of {type(given).__module__}."
                )

    @property
    def rank0_only(self) -> bool:
        return getattr(self.state_dict_config, "rank0_only", False)

    @property
    def optim_rank0_only(self) -> bool:
        return getattr(self.optim_state_dict_config, "rank0_only", False)


def settings_for(
    kind: StateDictType,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Return settings with the kind's own configs for None."""
    _check_kind(kind)
    default, optim_default = _CONFIGS[kind]
    return StateDictSettings(kind, config or default(), optim_config or optim_default())


def _check_kind(kind: object) -> None:
    if not isinstance(kind, StateDictType):
        raise TypeError(
            f"state_dict_type: expected a StateDictType of harness.engine, got {kind!r} of "
            f"{type(kind).__module__}."
        )
