"""One face for the engines that the suites hold to the same behaviour. Inside a rank; imports torch.

A suite says what it wants in a `ShardSpec` and reaches the engine through the `engine` fixture. What an
engine cannot do it refuses with NotImplementedError when a spec asks for it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import harness.engine as lockstep
from harness.engine.axes import ProcessGroups
from harness.engine.collectives import GATHER, REDUCE, SPREAD, WRAP
from harness.recorders import Collective

__all__ = ["Composable", "Engine", "Group", "Precision", "ShardSpec", "Traffic", "find"]


@dataclass(frozen=True)
class Precision:
    """Dtypes of computation and communication; None keeps what the model has.

    ``param_dtype``: parameters in forward and backward, and their gather. ``reduce_dtype``: gradients on the
    wire; None means ``param_dtype``. ``buffer_dtype``: floating-point buffers. ``cast_forward_inputs``: units
    below the root cast their floating-point arguments to ``param_dtype``; ``cast_root_forward_inputs``: the
    root does. ``keep_low_precision_grads``: gradients stay in the dtype they were reduced in.
    ``full_precision_classes``: each module of these classes becomes a unit of its own that computes in full
    precision, whatever units are chosen; None leaves it to the engine, which does so with batch norms where
    a spec chooses units at all.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    full_precision_classes: tuple[type[nn.Module], ...] | None = None


@dataclass(frozen=True)
class ShardSpec:
    """How a model is to be sharded, in words that fit every engine.

    ``strategy``: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or _HYBRID_SHARD_ZERO2. ``precision`` None
    does not name one to the engine at all. ``units``: submodules that gather and free on their own, by name
    within the model or by class; ``(nn.Module,)`` is all of them. ``min_num_params``, instead of ``units``:
    every submodule with at least so many elements in parameters that no unit below it has. ``ignored``:
    submodules that are neither sharded nor cast nor synchronised, chosen as ``units`` are. ``offload``:
    shards, gradients and the optimizer's step on CPU. ``use_orig_params``: the user sees the original
    parameters, not one flat parameter per group.
    ``backward_prefetch``: BACKWARD_PRE, BACKWARD_POST or None, and ``forward_prefetch``: whether a group is
    gathered before it is needed. ``sync_module_states``: all ranks start from rank 0's values. ``device``:
    where to compute; None is where the model is. ``process_group``: the ranks that share the model; for the
    two hybrid strategies a pair (shard, replicate), the ranks that this rank shares a replica with and those
    that hold the same shard as it. None is the default group, or for a pair what the engine makes of hosts.
    ``unit_groups``: the process groups of units that do not share the model's, by the units' names.
    ``unit_precisions``: likewise the precisions of units that do not have the model's.
    ``full_precision_in_eval``: whether precisions hold in training only; None leaves that to the environment.
    """

    strategy: str = "FULL_SHARD"
    precision: Precision | None = Precision()
    units: tuple[str | type[nn.Module], ...] = ()
    min_num_params: int | None = None
    ignored: tuple[str | type[nn.Module], ...] = ()
    offload: bool = False
    use_orig_params: bool = False
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    sync_module_states: bool = False
    device: torch.device | None = None
    process_group: ProcessGroups | None = None
    unit_groups: Mapping[str, ProcessGroups] = field(default_factory=dict)
    unit_precisions: Mapping[str, Precision] = field(default_factory=dict)
    full_precision_in_eval: bool | None = None


class Group(Protocol):
    """What an engine shows of one group of parameters, as it is at the moment of asking.

    ``parameters`` are names as in the bare model. ``state.name`` is SHARDED, PREFETCHED (full parameters
    are on their way), GATHERED, KEPT or SPLIT (they wait for backward, whole or
    cut over a few ranks) or SUMMONED. ``gradient_dtype`` is None while
    no gradient is held. ``post_backward_hooks``: for each full parameter that modules compute with, how many
    hooks await its gradient; empty before the first gather. ``local_numel`` and ``full_numel`` count elements
    of this rank's shard and of all shards, ``padding`` included. ``local_bytes`` is what the shard occupies,
    ``gathered_bytes`` what full parameters occupy now, 0 when they are freed. ``low_precision_bytes`` is what
    the copy of the shard occupies that is cast to be sent in a gather: 0 once that has arrived, and always
    where nothing is cast.
    """

    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def state(self) -> Enum: ...
    @property
    def original_dtype(self) -> torch.dtype: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def reduce_dtype(self) -> torch.dtype: ...
    @property
    def flat_dtype(self) -> torch.dtype: ...
    @property
    def gradient_dtype(self) -> torch.dtype | None: ...
    @property
    def post_backward_hooks(self) -> tuple[int, ...]: ...
    @property
    def local_numel(self) -> int: ...
    @property
    def full_numel(self) -> int: ...
    @property
    def padding(self) -> int: ...
    @property
    def local_bytes(self) -> int: ...
    @property
    def gathered_bytes(self) -> int: ...
    @property
    def low_precision_bytes(self) -> int: ...
    @property
    def training(self) -> bool: ...


@dataclass(frozen=True)
class Traffic:
    """What a log of collectives says of an engine, in order.

    ``gathers``: one entry for each gather of parameters, with the shard that this rank handed in.
    ``reductions``: one entry for each operation that brings gradients together, with what was handed in.
    ``others``: what belongs to neither.
    """

    gathers: tuple[Collective, ...]
    reductions: tuple[Collective, ...]
    others: tuple[Collective, ...]


@dataclass(frozen=True)
class Composable:
    """The front that shards modules in place: torch's public names, with torch's signatures."""

    fully_shard: Callable[..., Any]
    replicate: Callable[..., Any]
    MixedPrecisionPolicy: type[Any]
    OffloadPolicy: type[Any]
    CPUOffloadPolicy: type[Any]
    FSDPModule: type[Any]
    register_fsdp_forward_method: Callable[[nn.Module, str], None]


class Engine(Protocol):
    """What shards a model. Every method is called on all ranks in step."""

    @property
    def name(self) -> str:
        """What `find` and the option ``--engine`` call it."""
        ...

    @property
    def composable(self) -> Composable:
        """Return the front that shards modules in place."""
        ...

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        """Return the sharded model; ``model`` is used up by it."""
        ...

    def groups(self, model: nn.Module) -> Sequence[Group]:
        """Return the groups of a sharded model, outer before inner."""
        ...

    def pre_backward_hooks(self, output: Tensor) -> int:
        """Return how many hooks on an output of a sharded module or unit announce its backward."""
        ...

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return copies of all parameters in full, original dtype, by their names in the bare model."""
        ...

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        """Return copies of all gradients in full, by parameter name; None where no rank has one."""
        ...

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the model shows full original parameters; changes are kept if told."""
        ...

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        """Return what of ``log`` is a gather of parameters or a reduction of gradients.

        What an engine sends to compare what ranks wrap is left out.
        """
        ...

    def grad_scaler(
        self,
        model: nn.Module,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: ProcessGroups | None = None,
    ) -> torch.amp.GradScaler:
        """Return a scaler for the gradients of ``model``, used as torch's own: all ranks step, or none.

        ``process_group``: the ranks that agree, as in the model's `ShardSpec`; None is the default group.
        """
        ...


class Lockstep:
    """The built-in engine: its wrapper front, and beside it the composable one."""

    name = "lockstep"

    @property
    def composable(self) -> Composable:
        return Composable(
            lockstep.fully_shard,
            lockstep.replicate,
            lockstep.MixedPrecisionPolicy,
            lockstep.OffloadPolicy,
            lockstep.CPUOffloadPolicy,
            lockstep.FSDPModule,
            lockstep.register_fsdp_forward_method,
        )

    def shard(self, model: nn.Module, spec: ShardSpec) -> nn.Module:
        return lockstep.FullyShardedDataParallel(
            model,
            process_group=spec.process_group,
            sharding_strategy=_strategy(spec.strategy),
            cpu_offload=lockstep.CPUOffload(spec.offload),
            auto_wrap_policy=_policy(model, spec),
            ignored_modules=_chosen(model, spec.ignored, "ignored") or None,
            backward_prefetch=_backward_prefetch(spec.backward_prefetch),
            forward_prefetch=spec.forward_prefetch,
            mixed_precision=_mixed_precision(spec.precision),
            device_id=spec.device,
            sync_module_states=spec.sync_module_states,
            use_orig_params=spec.use_orig_params,
            full_precision_in_eval=spec.full_precision_in_eval,
        )

    def groups(self, model: nn.Module) -> Sequence[Group]:
        return lockstep.groups(model)

    def pre_backward_hooks(self, output: Tensor) -> int:
        # torch has no public question for it; a test that asks has put no hook of its own there.
        return len(output._backward_hooks or ())

    def summon(self, model: nn.Module, writeback: bool = False) -> AbstractContextManager[None]:
        return lockstep.FullyShardedDataParallel.summon_full_params(model, writeback=writeback)

    def full_parameters(self, model: nn.Module) -> Mapping[str, Tensor]:
        with self.summon(model):
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def full_gradients(self, model: nn.Module) -> Mapping[str, Tensor | None]:
        summon = lockstep.FullyShardedDataParallel.summon_full_params
        with summon(model, writeback=False, with_grads=True):
            return {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }

    def traffic(self, log: Iterable[Collective]) -> Traffic:
        log = tuple(log)
        gathers = [entry for entry in log if entry.label == GATHER]
        reductions = [entry for entry in log if entry.label == REDUCE]
        # A sum in low precision is made piece by piece, and then spread: that is a part of its reduction.
        others = [entry for entry in log if entry.label not in (GATHER, REDUCE, SPREAD, WRAP)]
        return Traffic(tuple(gathers), tuple(reductions), tuple(others))

    def grad_scaler(self, model: nn.Module, **settings: Any) -> torch.amp.GradScaler:
        return lockstep.ShardedGradScaler(**settings)


_ENGINES: Mapping[str, type[Engine]] = {"lockstep": Lockstep}


def find(name: str) -> Engine:
    """Return the engine that is called ``name``; ValueError with the known names if there is none."""
    if name not in _ENGINES:
        raise ValueError(f"no engine is called {name!r}; known: {', '.join(sorted(_ENGINES))}")
    return _ENGINES[name]()


def _strategy(name: str) -> lockstep.ShardingStrategy:
    known = lockstep.ShardingStrategy.__members__
    if name not in known:
        raise ValueError(f"ShardSpec: strategy {name!r} is not built; known: {', '.join(known)}")
    return known[name]


def _backward_prefetch(name: str | None) -> lockstep.BackwardPrefetch | None:
    known = lockstep.BackwardPrefetch.__members__
    if name is not None and name not in known:
        raise ValueError(f"ShardSpec: backward_prefetch {name!r} is unknown; known: {', '.join(known)}, None")
    return None if name is None else known[name]


def _mixed_precision(precision: Precision | None) -> lockstep.MixedPrecision | None:
    if precision is None:
        return None
    asked = {f.name: getattr(precision, f.name) for f in fields(Precision)}
    classes = asked.pop("full_precision_classes")
    ignored = {} if classes is None else {"_module_classes_to_ignore": classes}
    return lockstep.MixedPrecision(**asked, **ignored)


def _policy(model: nn.Module, spec: ShardSpec) -> lockstep.WrapPolicy | Callable[..., bool] | None:
    wanted = (*spec.units, *spec.unit_groups, *spec.unit_precisions)
    if spec.min_num_params is not None:
        if wanted:
            raise ValueError("ShardSpec: min_num_params chooses the units; name no unit beside it.")
        return partial(lockstep.size_based_auto_wrap_policy, min_num_params=spec.min_num_params)
    # Classes that compute in full precision are found by whatever policy, also by one that chooses nothing.
    if wanted or (spec.precision and spec.precision.full_precision_classes is not None):
        return _policy_of_chosen(model, spec, _chosen(model, wanted, "units"))
    return None


def _policy_of_chosen(
    model: nn.Module, spec: ShardSpec, chosen: Collection[nn.Module]
) -> lockstep.WrapPolicy:
    modules = dict(model.named_modules())
    own: dict[nn.Module, dict[str, Any]] = {}
    for name, group in spec.unit_groups.items():
        own.setdefault(modules[name], {})["process_group"] = group
    for name, precision in spec.unit_precisions.items():
        own.setdefault(modules[name], {})["mixed_precision"] = _mixed_precision(precision)
    return lockstep.CustomPolicy(lambda module: own.get(module, module in chosen))


def _chosen(model: nn.Module, wanted: tuple[str | type[nn.Module], ...], what: str) -> set[nn.Module]:
    """Return the submodules that names and classes in ``wanted`` choose; ValueError for an unknown name."""
    modules = dict(model.named_modules())
    unknown = [name for name in wanted if isinstance(name, str) and name not in modules]
    if unknown:
        raise ValueError(
            f"ShardSpec: {what} {unknown} are not submodules of {type(model).__name__}; "
            f"it has {[name for name in modules if name]}"
        )
    classes = tuple(kind for kind in wanted if isinstance(kind, type))
    return {m for name, m in modules.items() if name in wanted or isinstance(m, classes)}
