"""The settings of one unit, as every front passes them to `init.build_unit`. Imports no process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lockstep.engine.api import BackwardPrefetch, MixedPrecision, ShardingStrategy
from lockstep.engine.mesh import MeshInfo


@dataclass(frozen=True)
class Ignored:
    """Modules, with all modules below them, and parameters, with those modules' own, that are not sharded."""

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()

    @property
    def states(self) -> frozenset[nn.Module | nn.Parameter]:
        return self.modules | self.parameters

    def union(self, others: Sequence[Ignored]) -> Ignored:
        return Ignored(
            self.modules.union(*(other.modules for other in others)),
            self.parameters.union(*(other.parameters for other in others)),
        )


@dataclass(frozen=True)
class UnitConfig:
    """One unit's settings, with defaults filled in: frozen, so that units and their copies share it.

    Attributes:
        name: Names the unit in error messages.
        device: Where arguments of the root and buffers are moved to, and where an offloaded unit computes;
            None leaves them where they are.
        output_dtype: Of floating-point results; None leaves them as they are.
        keeps_precision: The unit has full precision among units without: its floating-point arguments are
            cast up, and its results back to the dtype that came in.
        dtensor: The mesh over which parameters become `DTensor`s: each is sharded along one dim, modules
            register unsharded parameters, and gradients wait out of sight until they are reduced. None:
            parameters lie in one flat shard, and the user always sees the gradients.
        placement_fn: The user's `shard_placement_fn`.
        use_orig_params: The user sees the original parameters, and not the flat one.
        poison: Fill freed and sent memory with NaN, so that a late reader shows.
    """

    name: str
    strategy: ShardingStrategy
    mesh: MeshInfo
    mixed_precision: MixedPrecision
    device: torch.device | None
    offload: bool
    use_orig_params: bool = True
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    full_precision_in_eval: bool = False
    keeps_precision: bool = False
    output_dtype: torch.dtype | None = None
    dtensor: DeviceMesh | None = None
    placement_fn: Callable[[nn.Parameter], Shard | None] | None = None
    ignored: Ignored = field(default=Ignored(), repr=False)
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = False
    poison: bool = field(default_factory=lambda: os.environ.get("LOCKSTEP_ENGINE_DEBUG", "") not in ("", "0"))
