"""The built-in sharding engine. Imports torch, and nothing else of harness.

With LOCKSTEP_ENGINE_DEBUG=1 in the environment when a model is wrapped, memory that has been freed or sent is
filled with NaN, so that a late reader shows; but not what ranks of lockstep.shm read where it lies: others
may still do so when this rank is done.
"""

from lockstep.engine.api import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    GroupInfo,
    GroupState,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from lockstep.engine.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from lockstep.engine.fully_shard import fully_shard, replicate
from lockstep.engine.grad_scaler import ShardedGradScaler
from lockstep.engine.groups import groups
from lockstep.engine.wrapper import FullyShardedDataParallel
from lockstep.engine.wrapping import (
    CustomPolicy,
    ModuleWrapPolicy,
    WrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GroupInfo",
    "GroupState",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "WrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "groups",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
