"""The public names of the engine."""

import harness.engine


def test_the_exported_names_are_the_documented_ones():
    assert sorted(harness.engine.__all__) == [
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
        "size_based_auto_wrap_policy",
        "transformer_auto_wrap_policy",
        "wrap",
    ]
