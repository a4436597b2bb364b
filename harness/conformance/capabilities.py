"""Capabilities that engines may lack. Used on both sides; must not import torch."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

# pytest.skip.Exception, by the name under which it can be subclassed with types.
from _pytest.outcomes import Skipped


class Capability(Enum):
    """Something that a claim may require and that not every engine has."""

    SHARDING = "sharding"
    HYBRID = "hybrid sharding"
    HYBRID_BY_HOSTS = "replicas made of hosts"
    REPLICATION = "replicas that are not sharded"
    OFFLOAD = "offload to CPU"
    UNIT_GROUPS = "process groups of units"
    UNITS_BY_SIZE = "units by size"
    MIXED_PRECISION = "mixed precision"
    UNIT_PRECISIONS = "precisions of units"
    BUFFER_DTYPE = "casts of buffers"
    KEPT_LOW_PRECISION = "gradients kept in low precision"
    PRECISION_IN_EVAL = "full precision in eval"
    NORM_UNITS = "norms in full precision by themselves"
    PREFETCH = "a choice of prefetch"
    SYNC_STATES = "states of rank 0 for all"
    NO_SYNC = "backwards that reduce nothing"
    UNSYNCED_GRADIENTS = "unsynced gradients in sight"
    PLAIN_PARAMETERS = "plain tensors as parameters"
    OUTSIDE_READS = "weights read outside their unit"
    SCALARS = "parameters without dimensions"
    CLIPPING = "clipping of gradients"
    GRAD_SCALER = "a gradient scaler"
    OPTIMIZER_STATE = "a view of the optimizer's state"
    ONE_NORM = "a norm over parts that are sharded differently"
    ONE_PADDING = "one padding for each group"
    EARLY_REDUCTION = "a reduction as soon as a group has its gradients"
    STATE_DICTS = "state dicts by type"
    SUMMON = "full parameters in place"
    GROUPS = "a view of groups"
    HOOKS = "a view of hooks"
    TRAFFIC = "traffic by group"
    COMPILED = "models that torch.compile compiles"
    COMPOSABLE = "the composable front"
    WRAPPER = "the wrapper front"


class NotOffered(Skipped):
    """Raised by an adapter, on all ranks alike, where its engine lacks what is requested."""

    def __init__(self, engine: str, capability: Capability) -> None:
        super().__init__(f"{engine} does not offer: {capability.value}")
        self.engine = engine
        self.capability = capability


class _Offering(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def capabilities(self) -> frozenset[Capability]: ...


def offers(engine: _Offering, capability: Capability) -> bool:
    """Return whether `engine` has it: for a claim of which one part requires more than the rest."""
    return capability in engine.capabilities


def require(engine: _Offering, *wanted: Capability) -> None:
    """Raise `NotOffered` for the first of `wanted` that `engine` does not have."""
    for capability in wanted:
        if capability not in engine.capabilities:
            raise NotOffered(engine.name, capability)
