"""What a user decides about sharding: frozen values, no behaviour. May import torch only."""

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
