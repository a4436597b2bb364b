"""The composable front: `fully_shard` and `replicate`, with PyTorch's public names. Runs on ranks.

Both give the parameters of a module to one group, and the module a class from `fsdp_module`. The group of
`replicate` has a shard axis of size one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.engine.api import (
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from lockstep.engine.config import Ignored, UnitConfig
from lockstep.engine.fsdp_module import FSDPModule, adopt, class_of
from lockstep.engine.init import build_unit, check_type, ignored_parameters
from lockstep.engine.mesh import MeshInfo, ProcessGroups, check_neighbours, device_of
from lockstep.engine.unit import Unit
from lockstep.engine.wrapping import has_forward

Modules = TypeVar("Modules", nn.Module, list[nn.Module])


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Collection[nn.Parameter] | None = None,
) -> Modules:
    """Shard the parameters of `module` over the ranks of `mesh`, in place; every rank calls it in step.

    Those that no module below has in a group of its own make one group: so apply it to submodules first. A
    list of modules shares one group. Parameters become `DTensor`s with Shard, in the chunks of torch.chunk;
    tensor parallel ones keep their axes. Gradients are the mean over ranks. All ranks must start from the
    same parameters; only their names, shapes and dtypes are compared. Make the optimizer afterwards: one made
    before refuses to step.

    Args:
        mesh: Of one axis, or of two (replicate, shard); None is all ranks. With tensor parallel parameters:
            other axes of the mesh that has theirs, which must be named.
        reshard_after_forward: Reshard between forward and backward; None: all groups but the root's; an int:
            over that many neighbouring ranks; 1 keeps.
        shard_placement_fn: Returns the dim along which a parameter is sharded, evenly or not; None: 0.
        mp_policy: Of this package, not torch's; `offload_policy` likewise.
        ignored_params: Are not sharded.

    Raises:
        ValueError, TypeError: For what cannot be sharded; the message says what, where, and the remedy.
    """
    modules = _listed(module)
    ignored = ignored_parameters("fully_shard", ignored_params)
    mesh = mesh_of(mesh, modules, "fully_shard", 2, ignored)
    config = _config(modules, "fully_shard", mesh, mp_policy, offload_policy)
    config = replace(config, ignored=ignored, placement_fn=shard_placement_fn)
    reshard_to = None
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        check_neighbours(config.mesh, reshard_after_forward)
        count = reshard_after_forward
        reshard_to = count if 1 < count < config.mesh.num_shards else None
        reshard_after_forward = count > 1  # one rank that has all of it retains it
    options = _compose(modules, config, "FSDP").options
    options.reshard_to, options.reshard_after_forward = reshard_to, reshard_after_forward
    return module


def replicate(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Collection[nn.Parameter] | None = None,
) -> Modules:
    """Replicate `module` on the ranks of `mesh` (of one axis; None is all ranks), in place.

    As `fully_shard`, but parameters become `DTensor`s with Replicate, nothing is gathered, and the gradients
    of a group are averaged in one all-reduce.
    """
    modules = _listed(module)
    ignored = ignored_parameters("replicate", ignored_params)
    mesh = mesh_of(mesh, modules, "replicate", 1, ignored)
    config = _config(modules, "replicate", mesh, mp_policy, offload_policy)
    _compose(modules, replace(config, ignored=ignored), "Replicate")
    return module


def _listed(given: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return given if isinstance(given, list) else [given]


def _config(
    modules: list[nn.Module],
    front: str,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> UnitConfig:
    """Return the settings of `front` on `mesh`; raise TypeError for other policies, torch's own included."""
    check_type(MixedPrecisionPolicy, f"{front}: mp_policy must be a", mp_policy)
    check_type(OffloadPolicy, "offload_policy must be an", offload_policy)
    groups: ProcessGroups
    if front == "replicate":
        strategy, groups = ShardingStrategy.NO_SHARD, mesh.get_group()
    elif mesh.ndim == 2:
        strategy, groups = ShardingStrategy.HYBRID_SHARD, (mesh.get_group(1), mesh.get_group(0))
    else:
        strategy, groups = ShardingStrategy.FULL_SHARD, mesh.get_group()
    on_cpu = mesh.device_type == "cpu"
    casts = mp_policy.cast_forward_inputs
    return UnitConfig(
        name=f"{front}({', '.join(type(module).__name__ for module in modules)})",
        strategy=strategy,
        mesh=MeshInfo.of(strategy, groups),
        mixed_precision=MixedPrecision(
            param_dtype=mp_policy.param_dtype,
            reduce_dtype=mp_policy.reduce_dtype,
            cast_forward_inputs=casts,
            cast_root_forward_inputs=casts,
        ),
        device=None if on_cpu else torch.device(mesh.device_type, torch.accelerator.current_device_index()),
        offload=isinstance(offload_policy, CPUOffloadPolicy),
        output_dtype=mp_policy.output_dtype,
        dtensor=mesh,
    )


def _compose(modules: list[nn.Module], config: UnitConfig, prefix: str) -> Unit:
    _refuse_modules(modules, config.name)
    unit = build_unit(modules, config, lambda module: isinstance(module, FSDPModule))
    for module in modules:
        # mypy doubts that a class can be hashed
        module.__class__ = class_of(type(module), prefix)  # type: ignore[arg-type]
    adopt([m for m in modules if isinstance(m, FSDPModule)], unit)
    return unit


def _refuse_modules(modules: Sequence[object], name: str) -> None:
    if not modules:
        raise ValueError(f"{name}: an empty list has nothing to shard.")
    for index, module in enumerate(modules):
        if module in modules[:index]:
            raise ValueError(f"{name}: a {type(module).__name__} is in the list twice; name it once.")
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name}: expected an nn.Module or a list of them, got {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name}: {type(module).__name__} has a group already; apply it once.")
        if not has_forward(module):
            kind = type(module).__name__
            raise ValueError(f"{name}: {kind} has no forward of its own; pass the modules in it.")


def _device_type(parameter: nn.Parameter) -> str:
    """Return the type of the device that computes with it: what an inner unit offloads lies on the CPU."""
    return parameter.device_mesh.device_type if isinstance(parameter, DTensor) else parameter.device.type


def mesh_of(
    mesh: DeviceMesh | None, modules: Sequence[nn.Module], front: str, most: int, ignored: Ignored
) -> DeviceMesh:
    """Return the mesh of a front that is given `mesh`: by default all ranks, on the device of parameters.

    Raises:
        RuntimeError, TypeError, ValueError: there is none, or it has other axes.
    """
    if not dist.is_initialized():
        raise RuntimeError(f"{front} needs a process group: call torch.distributed.init_process_group first.")
    if mesh is None:
        world = dist.group.WORLD
        assert world is not None
        given = (module for module in modules if isinstance(module, nn.Module))  # others are refused later
        parameters = chain.from_iterable(module.parameters() for module in given)
        types = [_device_type(parameter) for parameter in parameters if parameter not in ignored.parameters]
        found = next((type for type in types if type not in ("cpu", "meta")), device_of((), world).type)
        return DeviceMesh.from_group(world, found)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{front}: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim > most:
        axes = "one axis, or two (replicate, shard)" if most == 2 else "one axis"
        raise ValueError(f"{front}: mesh must have {axes}, got {mesh.ndim}.")
    return mesh
