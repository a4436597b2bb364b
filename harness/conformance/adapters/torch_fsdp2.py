"""The adapter of torch's `fully_shard` (FSDP2) and the `replicate` built on it. Inside a rank."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

from lockstep.conformance.adapters.composed import Composed
from lockstep.conformance.adapters.torch_internals import fsdp2_groups, replicate
from lockstep.conformance.capabilities import Capability
from lockstep.conformance.interface import Composable, Traffic
from lockstep.conformance.spec import ShardSpec
from lockstep.engine import GroupInfo
from lockstep.recorders import Collective

# What torch writes on the profiler's timeline; the innermost label is what a collective is for.
_GATHER, _REDUCE = "FSDP::all_gather", "FSDP::post_backward_reduce"


class TorchFsdp2(Composed):
    """`torch.distributed.fsdp.fully_shard`."""

    name = "torch-fsdp2"
    capabilities = Composed.capabilities - {Capability.HOOKS, Capability.SCALARS, Capability.EARLY_REDUCTION}

    def _check_dimensions(self, model: nn.Module, spec: ShardSpec) -> None:
        super()._check_dimensions(model, replace(spec, strategy="FULL_SHARD"))  # replicas have none either

    @property
    def composable(self) -> Composable:
        # A hint about in-place changes of outputs, not about values.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        return Composable(
            fsdp.fully_shard,
            replicate(),
            fsdp.MixedPrecisionPolicy,
            fsdp.OffloadPolicy,
            fsdp.CPUOffloadPolicy,
            fsdp.FSDPModule,
            fsdp.register_fsdp_forward_method,
            fsdp.share_comm_ctx,
        )

    def groups(self, model: nn.Module) -> Sequence[GroupInfo]:
        return fsdp2_groups(model)

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        log = tuple(log)
        gathers = tuple(entry for entry in log if entry.label.startswith(_GATHER))
        reductions = tuple(entry for entry in log if entry.label.startswith(_REDUCE))
        return Traffic(gathers, reductions, tuple(e for e in log if e not in gathers + reductions))

    def grad_scaler(
        self, model: nn.Module, *, process_group: object = None, **settings: Any
    ) -> torch.amp.GradScaler:
        # DTensors agree over their own mesh.
        return torch.amp.GradScaler("cpu" if not torch.cuda.is_available() else "cuda", **settings)
