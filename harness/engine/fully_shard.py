"""The composable front: `fully_shard` and `replicate`, with PyTorch's public names. Runs on ranks.

Both give the parameters of a module to one group, and the module a class from `composed`. That of `replicate`
is a group whose shard axis has size one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from harness.engine import init
from harness.engine.api import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from harness.engine.casting import Buffers
from harness.engine.config import Precision
from harness.engine.fsdp_module import FSDPModule, adopt, class_of
from harness.engine.gradients import AccumulatedGradients
from harness.engine.layout import RowLayout
from harness.engine.local_shard import GroupSettings, LocalShard, cut, layout_of
from harness.engine.mesh import MeshInfo, check_neighbours
from harness.engine.param import (
    DTensorParam,
    DTensorPlacement,
    Param,
    check,
    collect,
    invalidate,
    mark_sharded,
    own_modules,
    refuse_sharded,
)
from harness.engine.param_group import ParamGroup
from harness.engine.unit import Unit, UnitSettings
from harness.engine.wrapping import has_forward

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
    """Shard the parameters of ``module`` over the ranks of ``mesh``, in place; every rank calls it in step.

    Those that no module below has in a group of its own make one group: so apply it to submodules first. A
    list of modules shares one group. Parameters become `DTensor`s with Shard(0), cut as torch.chunk does;
    gradients are the mean over ranks. All ranks must start from the same parameters; only their names, shapes
    and dtypes are compared. Make the optimizer afterwards: one made before refuses to step.

    ``mesh``: of one axis, or of two (replicate, shard); None is all ranks. ``reshard_after_forward``: whether
    full parameters are given up between forward and backward; None: but for the root's; an int: over how many
    neighbouring ranks they are cut then. ``shard_placement_fn`` may ask for dim 0 only. ``mp_policy``,
    ``offload_policy``: of this package, not torch's. ``ignored_params``: left alone.

    Raises ValueError or TypeError for what cannot be sharded; the message says what, where, and the cure.
    """
    mesh = _mesh(mesh, "fully_shard", most=2)
    hybrid = mesh.ndim == 2
    asked = Asked(
        front="fully_shard",
        strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        axes=MeshInfo(mesh.get_group(1), mesh.get_group(0)) if hybrid else MeshInfo(mesh.get_group(), None),
        placing=DTensorPlacement(mesh, (Replicate(), Shard(0)) if hybrid else (Shard(0),)),
        policy=mp_policy,
        offload=_offloads(offload_policy),
        ignored=init.ignored_parameters("fully_shard", ignored_params),
        placement=shard_placement_fn,
    )
    freed = reshard_after_forward if isinstance(reshard_after_forward, bool) else None
    split_among = reshard_after_forward if freed is None else None
    if split_among is not None:
        check_neighbours(asked.axes, split_among)
    unit = _compose(module, asked, "FSDP")
    unit.options.split_among = split_among
    unit.options.frees_after_forward = freed if split_among is None else True
    return module


def replicate(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: Collection[nn.Parameter] | None = None,
) -> Modules:
    """Let each rank of ``mesh`` (of one axis; None is all ranks) hold ``module`` in full, in place.

    As `fully_shard`, but parameters become `DTensor`s with Replicate, nothing is gathered, and the gradients
    of a group are averaged in one all-reduce.
    """
    mesh = _mesh(mesh, "replicate", most=1)
    asked = Asked(
        front="replicate",
        strategy=ShardingStrategy.NO_SHARD,
        axes=MeshInfo(None, mesh.get_group()),
        placing=DTensorPlacement(mesh, (Replicate(),)),
        policy=mp_policy,
        offload=_offloads(offload_policy),
        ignored=init.ignored_parameters("replicate", ignored_params),
    )
    _compose(module, asked, "Replicate")
    return module


@dataclass(frozen=True)
class Asked:
    """What the user asked for, in the engine's terms."""

    front: str
    strategy: ShardingStrategy
    axes: MeshInfo
    placing: DTensorPlacement
    policy: MixedPrecisionPolicy
    offload: bool
    ignored: Collection[nn.Parameter]
    placement: Callable[[nn.Parameter], Shard | None] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError for policies of another type; torch's own are others, too."""
        if not isinstance(self.policy, MixedPrecisionPolicy):
            raise TypeError(
                f"{self.front}: mp_policy must be a MixedPrecisionPolicy of harness.engine, got "
                f"{self.policy!r}, a {type(self.policy).__qualname__} of {type(self.policy).__module__}."
            )

    @property
    def mixed_precision(self) -> MixedPrecision:
        casts = self.policy.cast_forward_inputs
        return MixedPrecision(
            param_dtype=self.policy.param_dtype,
            reduce_dtype=self.policy.reduce_dtype,
            cast_forward_inputs=casts,
            cast_root_forward_inputs=casts,
        )


def _offloads(policy: OffloadPolicy) -> bool:
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy must be an OffloadPolicy of harness.engine, got {policy!r}, a "
            f"{type(policy).__qualname__} of {type(policy).__module__}."
        )
    return isinstance(policy, CPUOffloadPolicy)


def _compose(given: nn.Module | list[nn.Module], asked: Asked, prefix: str) -> Unit:
    modules = given if isinstance(given, list) else [given]
    name = f"{asked.front}({_names(modules)})"
    _refuse_modules(modules, name)
    unit = _build(modules, asked, name)
    for module in modules:
        # mypy doubts that a class can be hashed
        module.__class__ = class_of(type(module), prefix)  # type: ignore[arg-type]
    adopt([m for m in modules if isinstance(m, FSDPModule)], unit)
    return unit


def _build(modules: Sequence[nn.Module], asked: Asked, name: str) -> Unit:
    owned = [
        (inner_name, inner)
        for index, module in enumerate(modules)
        for inner_name, inner in own_modules(
            module, lambda m: isinstance(m, FSDPModule), prefix=f"{index}" if len(modules) > 1 else ""
        )
    ]
    params = collect(owned, asked.ignored)
    refuse_sharded(owned, params, name)
    check(params, name, uniform_requires_grad=False)
    _refuse_placements(params, asked, name)
    device = _device(asked)
    init.refuse_disagreement([name, asked.strategy.name, *map(init.describe, params)], asked.axes, device)
    _move(owned, asked, device)
    precision = Precision(asked.mixed_precision, modules[0], full_in_eval=False)
    group = _group(params, _group_settings(asked, name, precision, device), asked.placing)
    return Unit(group, Buffers((), goes_back=False), _unit_settings(asked, precision, device))


def _unit_settings(asked: Asked, precision: Precision, device: torch.device) -> UnitSettings:
    return UnitSettings(
        asked.strategy,
        precision,
        None if device.type == "cpu" else device,
        keeps_precision=False,
        forward_prefetch=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        output_dtype=asked.policy.output_dtype,
    )


def _group_settings(asked: Asked, name: str, precision: Precision, device: torch.device) -> GroupSettings:
    return GroupSettings(
        unit=name,
        strategy=asked.strategy,
        precision=precision,
        use_orig_params=True,
        axes=asked.axes,
        offload_device=device if asked.offload else None,
        poison=init.poisons(),
        layout=RowLayout,
        registers_full=True,
    )


def _group(params: Sequence[Param], settings: GroupSettings, placing: DTensorPlacement) -> ParamGroup | None:
    if not params:
        return None
    name = settings.unit
    mark_sharded(params, name)  # the plain parameters: another group that sees one can say whose it is
    invalidate((param.parameter for param in params), f"parameters of {name} as they were before sharding")
    flat = nn.Parameter(cut(params, settings), any(param.parameter.requires_grad for param in params))
    layout, index = layout_of(params, settings), settings.axes.index
    shown = []
    for i, param in enumerate(params):
        piece = layout.piece(i, index)
        view = flat.data[piece.shard_start : piece.shard_stop].view(layout.piece_shape(i, index))
        shown.append(DTensorParam.of(param, view, placing))
    shard = LocalShard(shown, settings, flat)
    return ParamGroup(shard, AccumulatedGradients(shard))


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
            raise ValueError(
                f"{name}: {type(module).__name__} has no forward of its own; pass the modules in it."
            )


def _refuse_placements(params: Sequence[Param], asked: Asked, name: str) -> None:
    for param in params:
        if asked.axes.shard and not param.shape:
            raise ValueError(
                f"{name}: parameter {param.name!r} is 0-dim and cannot be cut; give it the shape (1,), or "
                "pass it in ignored_params."
            )
        wanted = asked.placement(param.parameter) if asked.placement else None
        if wanted is not None and wanted != Shard(0):
            raise NotImplementedError(
                f"{name}: shard_placement_fn wants {wanted!r} for parameter {param.name!r}; only Shard(0) is "
                "built."
            )


def _mesh(mesh: DeviceMesh | None, front: str, most: int) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(f"{front} needs a process group: call torch.distributed.init_process_group first.")
    if mesh is None:
        world = dist.group.WORLD
        assert world is not None
        return DeviceMesh.from_group(world, init.device_of((), world).type)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{front}: mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim > most:
        axes = "one axis, or two (replicate, shard)" if most == 2 else "one axis"
        raise ValueError(f"{front}: mesh must have {axes}, got {mesh.ndim}.")
    return mesh


def _device(asked: Asked) -> torch.device:
    kind = asked.placing.mesh.device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def _move(owned: Sequence[tuple[str, nn.Module]], asked: Asked, device: torch.device) -> None:
    """Bring what is on CPU to the mesh's device; parameters not if they are offloaded, or ignored."""
    for _, module in owned:
        parameters = [] if asked.offload else [p for p in module._parameters.values() if p is not None]
        for tensor in [*parameters, *(b for b in module._buffers.values() if b is not None)]:
            if tensor.device.type == "cpu" and tensor not in asked.ignored:
                tensor.data = tensor.data.to(device)


def _names(modules: Sequence[object]) -> str:
    return ", ".join(type(module).__name__ for module in modules)
