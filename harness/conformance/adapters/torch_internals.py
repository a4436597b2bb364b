"""Private names of torch that the adapters of its engines read. Inside a rank; imports torch.

Seen in torch 2.11 to 2.15. Where one moves, look for the public name or the attribute that its function
describes; nothing else of this package touches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.conformance.capabilities import Capability
from lockstep.conformance.interface import Snapshot
from lockstep.engine import GroupState, ShardingStrategy


def replicate() -> Any:
    """Return the `replicate` that is built on `fully_shard`.

    `torch.distributed._composable.replicate`, a module of the same name, is built on DistributedDataParallel.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def exclude_from_ddp(model: nn.Module, names: Iterable[str]) -> None:
    """Make DistributedDataParallel ignore parameters and buffers of `model`."""
    exclude: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    exclude(model, names)


def num_pre_backward_hooks(output: Tensor) -> int:
    """Return the number of hooks on a tensor; a test that counts them has added none itself."""
    return len(output._backward_hooks or ())


class Fsdp1Unit:
    """One wrapped module with parameters, of FSDP1: reads its `FlatParamHandle`."""

    def __init__(self, module: Any, name: str, names: Mapping[nn.Module, str]) -> None:
        self._module, self._handle, self._name, self._names = module, module._handle, name, names

    @property
    def shows_gradients(self) -> bool:
        """True if torch shows its gradients: originals are the parameters, and no_sync has left nothing."""
        return bool(self._module._use_orig_params) and not self._is_unsynced

    @property
    def _is_unsynced(self) -> bool:
        """True if the gradient is this rank's, of whole parameters, as no_sync leaves it."""
        flat = self._handle.flat_param
        if flat.grad is None or not self._handle.uses_sharded_strategy or self._handle.world_size == 1:
            return False
        return bool(flat.grad.numel() > flat._sharded_size.numel())

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the whole gradients that the flat gradient consists of, by parameter name; a collective."""
        handle, flat = self._handle, self._handle.flat_param
        gradient = flat.grad
        if gradient is None:
            return dict.fromkeys(self._parameters)
        if handle.uses_sharded_strategy and not self._is_unsynced:
            shards = [torch.empty_like(gradient) for _ in range(handle.world_size)]
            dist.all_gather(shards, gradient.contiguous(), handle.process_group)
            gradient = torch.cat(shards)[: flat._unpadded_unsharded_size.numel()]
        views = handle._get_unflat_views(gradient)
        return {name: view.clone() for name, view in zip(self._parameters, views, strict=True)}

    def snapshot(self) -> Snapshot:
        """Return what there is to see of the unit now."""
        handle, flat = self._handle, self._handle.flat_param
        shard = getattr(flat, "_local_shard", flat)
        full_numel = shard.numel() * (handle.world_size if handle.uses_sharded_strategy else 1)
        compute = handle._fwd_bwd_param_dtype or flat.dtype
        gradients = [flat.grad] if flat._params is None else [p.grad for p in flat._params]
        return Snapshot(
            "torch-fsdp1",
            {},
            name=self._name,
            parameters=self._parameters,
            state=self._state,
            sharding_strategy=ShardingStrategy[handle._sharding_strategy.name],
            original_dtype=handle._orig_param_dtype,
            compute_dtype=compute,
            reduce_dtype=handle._reduce_dtype or compute,
            flat_dtype=shard.dtype,
            gradient_dtype=next((g.dtype for g in gradients if g is not None), None),
            post_backward_hooks=self._post_backward_hooks,
            local_numel=shard.numel(),
            full_numel=full_numel,
            padding=full_numel - sum(flat._numels),
            local_bytes=shard.numel() * shard.itemsize,
            gathered_bytes=self._gathered_bytes,
            low_precision_bytes=_num_bytes(flat, "_mp_shard"),
            training=self._module.training,
        )

    @property
    def _parameters(self) -> tuple[str, ...]:
        return tuple(_parameter_name(info, self._names) for info in self._handle.flat_param._param_infos)

    @property
    def _post_backward_hooks(self) -> tuple[int, ...]:
        # One for the flat parameter, which all of its parameters share.
        flat = self._handle.flat_param
        has_hook = hasattr(flat, "_post_backward_hook_state") or hasattr(flat, "_post_backward_hook_handle")
        return (1,) * len(flat._param_infos) if has_hook else ()

    @property
    def _gathered_bytes(self) -> int:
        flat = self._handle.flat_param
        if not self._handle.uses_sharded_strategy:  # the shard is the whole; only a cast copy comes and goes
            return _num_bytes(flat, "_mp_shard")
        return _num_bytes(flat, "_full_param_padded") + _num_bytes(flat, "_full_prec_full_param_padded")

    @property
    def _state(self) -> GroupState:
        sharded, training_state = self._handle.uses_sharded_strategy, self._handle._training_state.name
        if sharded and self._gathered_bytes == 0:
            return GroupState.SHARDED
        if training_state in ("FORWARD", "BACKWARD_PRE"):
            return GroupState.UNSHARDED
        if training_state == "SUMMON_FULL_PARAMS":
            return GroupState.SUMMONED
        if self._handle._prefetched:
            return GroupState.PREFETCHED
        return GroupState.RETAINED if sharded else GroupState.SHARDED


def fsdp1_units(model: nn.Module, names: Mapping[nn.Module, str]) -> list[Fsdp1Unit]:
    """Return the units of FSDP1 that have parameters, outer before inner."""
    modules: list[Any] = [m for m in model.modules() if isinstance(m, fsdp.FullyShardedDataParallel)]
    return [Fsdp1Unit(module, names[module], names) for module in modules if module._handle is not None]


def fsdp2_groups(model: nn.Module) -> list[Snapshot]:
    """Return what there is to see of the parameter groups of `fully_shard`, outer before inner."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[Any, str] = {}
    for module, name in names.items():
        if isinstance(module, fsdp.FSDPModule):
            state: Any = module._get_fsdp_state()
            # One group in torch 2.11, a list of them later.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in filter(None, [state._fsdp_param_group]) if groups is None else groups:
                found.setdefault(group, name)
    return [_fsdp2_snapshot(group, name, names) for group, name in found.items()]


def _fsdp2_snapshot(group: Any, name: str, names: Mapping[nn.Module, str]) -> Snapshot:
    parameters = group.fsdp_params
    gradients = [p.sharded_param.grad for p in parameters]
    gradients += [p.unsharded_accumulated_grad for p in parameters]
    local = sum(p._sharded_param_data.numel() for p in parameters)
    full = local * getattr(group.mesh_info, "shard_mesh_size", 1)
    dtype = parameters[0].sharded_param.dtype
    # The group's in torch 2.13, each parameter's own in 2.15.
    policy = group.mp_policy if hasattr(group, "mp_policy") else parameters[0].mp_policy
    compute = policy.param_dtype or dtype
    missing = {"post_backward_hooks": Capability.HOOKS, "sharding_strategy": Capability.GROUPS}
    shown: dict[str, Any] = {}
    if compute == dtype:
        shown["low_precision_bytes"] = 0
    else:  # the cast is made into the unsharded parameters themselves: there is no copy of the shard to see
        missing["low_precision_bytes"] = Capability.GROUPS
    return Snapshot(
        "torch-fsdp2",
        missing,
        name=name,
        parameters=tuple(_parameter_name(p._module_info, names) for p in parameters),
        state=_fsdp2_state(group),
        original_dtype=dtype,
        compute_dtype=compute,
        reduce_dtype=policy.reduce_dtype or compute,
        flat_dtype=dtype,
        gradient_dtype=next((g.dtype for g in gradients if g is not None), None),
        local_numel=local,
        full_numel=full,
        padding=full - sum(p._orig_size.numel() for p in parameters),
        local_bytes=local * dtype.itemsize,
        gathered_bytes=sum(t.untyped_storage().nbytes() for p in parameters for t in p.all_gather_outputs),
        training=group.modules[0].training,
        **shown,
    )


def _fsdp2_state(group: Any) -> GroupState:
    match group._sharded_state.name, group._training_state.name:
        case "SHARDED", _:
            return GroupState.SHARDED if group._all_gather_result is None else GroupState.PREFETCHED
        case "SHARDED_POST_FORWARD", _:
            return GroupState.SHARDED_POST_FORWARD
        case _, "IDLE":
            return GroupState.RETAINED
        case _:
            return GroupState.UNSHARDED


def _parameter_name(info: Any, names: Mapping[nn.Module, str]) -> str:
    return ".".join(filter(None, [names[info.module], info.param_name]))


def _num_bytes(flat: Any, buffer: str) -> int:
    tensor: Tensor | None = getattr(flat, buffer, None)
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
