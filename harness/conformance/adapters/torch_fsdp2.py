"""The adapter of torch's `fully_shard` (FSDP2) and the `replicate` built on it. Inside a rank.

What torch shows of a parameter group it shows through private attributes; only this file reads them.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

from harness.conformance.adapters.composed import Composed
from harness.conformance.adapters.snapshot import ShownGroup
from harness.conformance.capabilities import Capability
from harness.conformance.interface import Composable, Group, Traffic
from harness.conformance.spec import ShardSpec
from harness.engine import GroupState
from harness.recorders import Collective

__all__ = ["TorchFsdp2"]

# What torch writes on the profiler's timeline; the innermost label is what a collective is for.
_GATHER, _REDUCE = "FSDP::all_gather", "FSDP::post_backward_reduce"


class TorchFsdp2(Composed):
    """`torch.distributed.fsdp.fully_shard`."""

    name = "torch-fsdp2"
    capabilities = Composed.capabilities - {
        Capability.HOOKS,
        Capability.SCALARS,
        Capability.EARLY_REDUCTION,
    }

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        # A hint on what users may do in place with outputs; it says nothing of the values.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        return super().shard(model, spec)

    def _check_dimensions(self, model: nn.Module, spec: ShardSpec) -> None:
        super()._check_dimensions(model, replace(spec, strategy="FULL_SHARD"))  # replicas have none either

    @property
    def composable(self) -> Composable:
        # No public module has it before torch makes it public; `torch.distributed._composable.replicate` of
        # the same name is another one, built on DistributedDataParallel.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        return Composable(
            fsdp.fully_shard,
            replicate,
            fsdp.MixedPrecisionPolicy,
            fsdp.OffloadPolicy,
            fsdp.CPUOffloadPolicy,
            fsdp.FSDPModule,
            fsdp.register_fsdp_forward_method,
        )

    def groups(self, model: nn.Module) -> Sequence[Group]:
        names = {module: name for name, module in model.named_modules()}
        found: dict[Any, Any] = {}
        for module in names:
            if isinstance(module, fsdp.FSDPModule):
                for group in _param_groups(module):
                    found.setdefault(group, module)
        return [_shown(self.name, group, names[module], names) for group, module in found.items()]

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


def _param_groups(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    # One group in torch 2.11, a list of them later.
    groups = getattr(state, "_fsdp_param_groups", None)
    yield from (filter(None, [state._fsdp_param_group]) if groups is None else groups)


def _shown(engine: str, group: Any, name: str, names: dict[nn.Module, str]) -> ShownGroup:
    parameters = group.fsdp_params
    first = parameters[0]
    gradients = [p.sharded_param.grad for p in parameters if p.sharded_param.grad is not None]
    waiting = [p.unsharded_accumulated_grad for p in parameters if p.unsharded_accumulated_grad is not None]
    local = sum(p._sharded_param_data.numel() for p in parameters)
    num_shards = getattr(group.mesh_info, "shard_mesh_size", 1)
    full = sum(p._orig_size.numel() for p in parameters)
    dtype = first.sharded_param.dtype
    policy = group.mp_policy
    return ShownGroup(
        engine=engine,
        name=name,
        parameters=tuple(_name_of(p._module_info, names) for p in parameters),
        state=_state_of(group),
        original_dtype=dtype,
        compute_dtype=policy.param_dtype or dtype,
        reduce_dtype=policy.reduce_dtype or policy.param_dtype or dtype,
        flat_dtype=dtype,
        gradient_dtype=next((g.dtype for g in (*gradients, *waiting)), None),
        local_numel=local,
        full_numel=local * num_shards,
        padding=local * num_shards - full,
        local_bytes=local * dtype.itemsize,
        gathered_bytes=sum(t.untyped_storage().nbytes() for p in parameters for t in p.all_gather_outputs),
        training=group.modules[0].training,
        # What is cast is cast into the gathered parameters themselves: of the shard there is no copy to see.
        cast_bytes=0 if (policy.param_dtype or dtype) == dtype else None,
    )


def _name_of(place: Any, names: dict[nn.Module, str]) -> str:
    return ".".join(filter(None, [names[place.module], place.param_name]))


def _state_of(group: Any) -> GroupState:
    match group._sharded_state.name, group._training_state.name:
        case "SHARDED", _:
            return GroupState.SHARDED if group._all_gather_result is None else GroupState.PREFETCHED
        case "SHARDED_POST_FORWARD", _:
            return GroupState.SHARDED_POST_FORWARD
        case _, "IDLE":
            return GroupState.RETAINED
        case _:
            return GroupState.UNSHARDED
