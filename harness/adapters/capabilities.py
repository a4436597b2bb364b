"""What engines may offer or not. Inside a rank, or where results are told; does not import torch."""

from enum import Enum

# pytest.skip.Exception, by the name under which it can be subclassed with types.
from _pytest.outcomes import Skipped

__all__ = ["Capability", "NotOffered"]


class Capability(Enum):
    """Something that a claim may ask of an engine and that not every engine has."""

    SHARDING = "sharding"
    HYBRID = "hybrid sharding"
    REPLICATION = "replication in a sharded model"
    OFFLOAD = "offload to CPU"
    MIXED_PRECISION = "mixed precision"
    INTROSPECTION = "introspection of groups"
    SUMMON = "full parameters in place"
    COMPOSABLE = "the composable front"
    WRAPPER = "the wrapper front"


class NotOffered(Skipped):
    """Raised by an adapter, on all ranks alike, where its engine is asked for what it does not have."""

    def __init__(self, engine: str, capability: Capability) -> None:
        super().__init__(f"{engine} does not offer: {capability.value}")
        self.engine = engine
        self.capability = capability
