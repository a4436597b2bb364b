"""The adapter of torch's `FullyShardedDataParallel` (FSDP1). Inside a rank.

What torch shows of a flat parameter it shows through private attributes; only this file reads them.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from harness.conformance.adapters.composed import asked
from harness.conformance.adapters.snapshot import ShownGroup
from harness.conformance.adapters.wrapped import Wrapped, WrapperFront
from harness.conformance.capabilities import Capability, NotOffered, require
from harness.conformance.interface import Composable, Group, Traffic
from harness.conformance.spec import ProcessGroups, ShardSpec
from harness.engine import GroupState
from harness.recorders import Collective

__all__ = ["TorchFsdp1"]

_PREFIX = "_fsdp_wrapped_module."
# What it says of choices that suites make on purpose; none is of the values.
_HINTS = (
    "The `NO_SHARD` sharding strategy is deprecated",
    "FSDP is switching to use `NO_SHARD`",
    "FSDP will not all-gather parameters for containers",
    "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will ?be returned",
    ".* has both parameters with requires_grad=True and False",
    r"Called FSDP.clip_grad_norm_\(\) on rank \d+ with no gradients",
)
# It says so of norms although nothing is cast.
_NORMS_APART = "Both mixed precision and an auto_wrap_policy were specified"
FSDP = fsdp.FullyShardedDataParallel


class TorchFsdp1(Wrapped):
    """`torch.distributed.fsdp.FullyShardedDataParallel`."""

    name = "torch-fsdp1"
    front = WrapperFront(
        FSDP,
        fsdp.ShardingStrategy,
        fsdp.BackwardPrefetch,
        fsdp.CPUOffload,
        fsdp.MixedPrecision,
        CustomPolicy,
        size_based_auto_wrap_policy,
    )

    @property
    def capabilities(self) -> frozenset[Capability]:
        # Full precision in eval is switched in the environment, for a whole process.
        lacking = {Capability.COMPOSABLE, Capability.PRECISION_IN_EVAL}
        lacking |= {Capability.SCALARS, Capability.EARLY_REDUCTION, Capability.ONE_PADDING}
        if not torch.accelerator.is_available():  # it pins memory, and broadcasts no tensors of the CPU
            lacking |= {Capability.OFFLOAD, Capability.SYNC_STATES}
        return frozenset(Capability) - lacking

    @property
    def composable(self) -> Composable:
        raise NotOffered(self.name, Capability.COMPOSABLE)

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        require(self, *asked(spec))
        if any(p.ndim == 0 for p in model.parameters()):
            raise NotOffered(self.name, Capability.SCALARS)
        for message in (*_HINTS, *(() if _casts(spec) else (_NORMS_APART,))):
            warnings.filterwarnings("ignore", message, Warning)
        # On a host without GPUs torch must be told where to compute.
        return self.wrap(model, spec, device_id=spec.device or next(model.parameters()).device)

    def groups(self, model: nn.Module) -> Sequence[Group]:
        names = _names(model)
        return [
            _shown(self.name, module, names)
            for module in model.modules()
            if isinstance(module, FSDP) and module._handle is not None
        ]

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        with self.summon(model):
            return {name: p.detach().clone() for name, p in self._named(model)}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        units: list[Any] = [m for m in model.modules() if isinstance(m, FSDP) and m._handle is not None]
        # torch shows gradients only where the originals are the parameters, and only reduced ones.
        if units and all(u._use_orig_params and not _is_unsynced(u._handle) for u in units):
            with self.summon(model, with_grads=True):
                # Gradients of frozen parameters are shown as zeros.
                grads = {n: p.grad if p.requires_grad else None for n, p in self._named(model)}
                return {n: None if g is None else g.clone() for n, g in grads.items()}
        names = _names(model)
        found: dict[str, Tensor | None] = {}
        for unit in units:
            found |= _gradients(unit, names)
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


def _casts(spec: ShardSpec) -> bool:
    precisions = filter(None, (spec.precision, *spec.unit_precisions.values()))
    return any(p.param_dtype or p.reduce_dtype or p.buffer_dtype for p in precisions)


def _names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names of all modules in the bare model; a wrapper has that of what is in it."""
    names = ((m, f"{name}.".replace(_PREFIX, "").strip(".")) for name, m in model.named_modules())
    return dict(names)


def _gradients(unit: Any, names: Mapping[nn.Module, str]) -> dict[str, Tensor | None]:
    """Return the gradients that a unit's flat gradient consists of, in full; a collective."""
    handle = unit._handle
    flat, gradient = handle.flat_param, handle.flat_param.grad
    parameters = [_name_of(info, names) for info in flat._param_infos]
    if gradient is None:
        return dict.fromkeys(parameters)
    if handle.uses_sharded_strategy and not _is_unsynced(handle):
        pieces = [torch.empty_like(gradient) for _ in range(handle.world_size)]
        dist.all_gather(pieces, gradient.contiguous(), handle.process_group)
        gradient = torch.cat(pieces)[: flat._unpadded_unsharded_size.numel()]
    views = handle._get_unflat_views(gradient)
    return {name: view.clone() for name, view in zip(parameters, views, strict=True)}


def _is_unsynced(handle: Any) -> bool:
    """Whether the gradient is this rank's own of the whole, kept by no_sync."""
    flat = handle.flat_param
    if flat.grad is None or not handle.uses_sharded_strategy or handle.world_size == 1:
        return False
    return bool(flat.grad.numel() > flat._sharded_size.numel())


def _shown(engine: str, unit: Any, names: Mapping[nn.Module, str]) -> ShownGroup:
    handle = unit._handle
    flat, num_shards = handle.flat_param, handle.world_size if handle.uses_sharded_strategy else 1
    shard = getattr(flat, "_local_shard", flat)
    compute = handle._fwd_bwd_param_dtype or flat.dtype
    return ShownGroup(
        engine=engine,
        name=names[unit],
        parameters=tuple(_name_of(info, names) for info in flat._param_infos),
        state=_state_of(handle),
        original_dtype=handle._orig_param_dtype,
        compute_dtype=compute,
        reduce_dtype=handle._reduce_dtype or compute,
        flat_dtype=shard.dtype,
        gradient_dtype=_gradient_dtype(flat),
        local_numel=shard.numel(),
        full_numel=shard.numel() * num_shards,
        padding=shard.numel() * num_shards - sum(flat._numels),
        local_bytes=shard.numel() * shard.itemsize,
        gathered_bytes=_gathered_bytes(handle),
        training=unit.training,
        hooks=_post_backward_hooks(flat),
        cast_bytes=flat._mp_shard.untyped_storage().nbytes() if hasattr(flat, "_mp_shard") else 0,
    )


def _name_of(info: Any, names: Mapping[nn.Module, str]) -> str:
    return ".".join(filter(None, [names[info.module], info.param_name]))


def _gradient_dtype(flat: Any) -> torch.dtype | None:
    originals = [p.grad for p in flat._params or () if p.grad is not None]
    gradients = originals if flat._params is not None else [flat.grad]
    return next((g.dtype for g in gradients if g is not None), None)


def _post_backward_hooks(flat: Any) -> tuple[int, ...]:
    # One for the flat parameter, which all of its parameters share.
    has_hook = hasattr(flat, "_post_backward_hook_state") or hasattr(flat, "_post_backward_hook_handle")
    return (1,) * len(flat._param_infos) if has_hook else ()


def _gathered_bytes(handle: Any) -> int:
    flat = handle.flat_param
    buffers = [getattr(flat, name, None) for name in ("_full_param_padded", "_full_prec_full_param_padded")]
    if not handle.uses_sharded_strategy:  # the shard is the whole; only a cast copy comes and goes
        buffers = [getattr(flat, "_mp_shard", None)]
    return sum(b.untyped_storage().nbytes() for b in buffers if b is not None)


def _state_of(handle: Any) -> GroupState:
    doing = handle._training_state.name
    if handle.uses_sharded_strategy and _gathered_bytes(handle) == 0:
        return GroupState.SHARDED
    if doing in ("FORWARD", "BACKWARD_PRE"):
        return GroupState.UNSHARDED
    if doing == "SUMMON_FULL_PARAMS":
        return GroupState.SUMMONED
    if handle._prefetched:
        return GroupState.PREFETCHED
    return GroupState.RETAINED if handle.uses_sharded_strategy else GroupState.SHARDED
