"""What the engine's files may import and call, read from their source."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import torch.distributed as dist

import harness.engine

FOLDER = Path(harness.engine.__file__).parent
TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(FOLDER.glob("*.py"))}
COLLECTIVES = {
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
}


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_engine_imports_nothing_else_of_harness():
    found = {name for tree in TREES.values() for name in imported(tree) if name.split(".")[0] == "harness"}
    assert found == {name for name in found if name.startswith("harness.engine.")}


def test_imports_inside_the_engine_have_no_cycle():
    graph = {
        stem: {
            other
            for other in TREES
            if any(f"{name}.".startswith(f"harness.engine.{other}.") for name in names)
        }
        for stem, names in ((stem, imported(tree)) for stem, tree in TREES.items())
    }
    assert set(TopologicalSorter(graph).static_order()) == set(TREES)


def test_only_collectives_calls_collectives_of_torch_distributed():
    known = {name for name in vars(dist) if any(name.startswith(verb) for verb in COLLECTIVES)}
    assert {"all_reduce", "all_to_all_single", "broadcast", "barrier"} <= known
    calling = {
        stem
        for stem, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "dist"
        and node.attr in known
    }
    assert calling == {"collectives"}


def test_public_names_are_the_documented_ones():
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
        "ReplicateModule",
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
