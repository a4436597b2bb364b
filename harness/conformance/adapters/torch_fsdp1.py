"""The adapter of torch's `FullyShardedDataParallel` (FSDP1). Inside a rank; imports torch."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.distributed.fsdp.wrap as wrapping
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from lockstep.conformance.adapters.torch_internals import fsdp1_units
from lockstep.conformance.adapters.wrapped import Wrapped
from lockstep.conformance.capabilities import Capability, NotOffered, require
from lockstep.conformance.interface import StateDicts, Traffic, Wrapper
from lockstep.conformance.spec import ProcessGroups, ShardSpec, required_capabilities
from lockstep.engine import GroupInfo
from lockstep.recorders import Collective

_PREFIX = "_fsdp_wrapped_module."
# Warnings about choices that suites make on purpose; none is about values.
_HINTS = (
    "The `NO_SHARD` sharding strategy is deprecated",
    "FSDP is switching to use `NO_SHARD`",
    "FSDP will not all-gather parameters for containers",
    "When using ..NO_SHARD.. for ..ShardingStrategy.., full_state_dict will ?be returned",
    ".* has both parameters with requires_grad=True and False",
    r"Called FSDP.clip_grad_norm_\(\) on rank \d+ with no gradients",
)
# Warned of norms although nothing is cast.
_NORMS_APART = "Both mixed precision and an auto_wrap_policy were specified"
FSDP = fsdp.FullyShardedDataParallel


class TorchFsdp1(Wrapped):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    name = "torch-fsdp1"
    front = Wrapper(
        FSDP,
        fsdp.ShardingStrategy,
        fsdp.BackwardPrefetch,
        fsdp.CPUOffload,
        fsdp.MixedPrecision,
        wrapping.CustomPolicy,
        wrapping.ModuleWrapPolicy,
        wrapping.always_wrap_policy,
        wrapping.lambda_auto_wrap_policy,
        wrapping.size_based_auto_wrap_policy,
        wrapping.transformer_auto_wrap_policy,
        wrapping.enable_wrap,
        wrapping.wrap,
    )

    def __init__(self) -> None:
        # Full precision in eval is switched in the environment, for a whole process.
        lacking = {Capability.COMPOSABLE, Capability.PRECISION_IN_EVAL}
        lacking |= {Capability.SCALARS, Capability.EARLY_REDUCTION, Capability.ONE_PADDING}
        if not torch.accelerator.is_available():  # it pins memory, and broadcasts no tensors of the CPU
            lacking |= {Capability.OFFLOAD, Capability.SYNC_STATES}
        self.capabilities = frozenset(Capability) - lacking

    @property
    def state_dicts(self) -> StateDicts:
        return StateDicts(
            FSDP,
            fsdp.StateDictType,
            fsdp.FullStateDictConfig,
            fsdp.LocalStateDictConfig,
            fsdp.ShardedStateDictConfig,
            fsdp.FullOptimStateDictConfig,
            fsdp.LocalOptimStateDictConfig,
            fsdp.ShardedOptimStateDictConfig,
        )

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        required = tuple(required_capabilities(spec))
        require(self, *required)
        if any(p.ndim == 0 for p in model.parameters()):
            raise NotOffered(self.name, Capability.SCALARS)
        for message in (*_HINTS, *(() if Capability.MIXED_PRECISION in required else (_NORMS_APART,))):
            warnings.filterwarnings("ignore", message, Warning)
        # On a host without GPUs torch needs to know where to compute.
        return self.wrap(model, spec, device_id=spec.device or next(model.parameters()).device)

    def groups(self, model: nn.Module) -> Sequence[GroupInfo]:
        return [unit.snapshot() for unit in fsdp1_units(model, _names(model))]

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        with self.summon(model):
            return {name: p.detach().clone() for name, p in self._named(model)}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        units = fsdp1_units(model, _names(model))
        if units and all(unit.shows_gradients for unit in units):
            with self.summon(model, with_grads=True):
                # Gradients of frozen parameters are shown as zeros.
                grads = {n: p.grad if p.requires_grad else None for n, p in self._named(model)}
                return {n: None if g is None else g.clone() for n, g in grads.items()}
        found: dict[str, Tensor | None] = {}
        for unit in units:
            found |= unit.gradients()
        with self.summon(model):
            parameters = dict(self._named(model))
        # To ask a parameter that is no leaf for its gradient is a warning.
        found |= {name: p.grad for name, p in parameters.items() if name not in found}
        return {name: found[name] for name in parameters}

    @staticmethod
    def _named(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
        return ((name.replace(_PREFIX, ""), p) for name, p in model.named_parameters())

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        log = tuple(log)
        own = [entry for entry in log if entry.label.startswith("FullyShardedDataParallel.")]
        gathers = tuple(e for e in own if e.op in ("all_gather", "all_gather_into_tensor"))
        reductions = tuple(e for e in own if e.op in ("reduce_scatter_tensor", "all_reduce"))
        return Traffic(gathers, reductions, tuple(e for e in log if e not in gathers + reductions))

    def grad_scaler(
        self, model: nn.Module, *, process_group: ProcessGroups | None = None, **settings: Any
    ) -> torch.amp.GradScaler:
        if isinstance(process_group, tuple):  # it has room for one
            raise NotOffered(self.name, Capability.HYBRID)
        device = next(model.parameters()).device.type
        if process_group is not None:
            settings["process_group"] = process_group
        return ShardedGradScaler(device, **settings)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names of all modules in the bare model; a wrapper has that of what is in it."""
    names = ((m, f"{name}.".replace(_PREFIX, "").strip(".")) for name, m in model.named_modules())
    return dict(names)
