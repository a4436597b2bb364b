"""The wrapper front: `FullyShardedDataParallel`, with PyTorch's public names. Runs on ranks.

It reads what the user asks for and hands it on: to `construction`, `hooks`, `summon` and `clip`. State dicts
are the affair of its base class, in `state_front`.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.engine import clip, construction
from harness.engine.hooks import Tree
from harness.engine.names import FLAT as _FLAT
from harness.engine.names import INNER as _INNER
from harness.engine.names import clean_name
from harness.engine.parameters import Slot
from harness.engine.policy import (
    BackwardPrefetch,
    CPUOffload,
    GroupInfo,
    MixedPrecision,
    ShardingStrategy,
)
from harness.engine.state_front import StateFront
from harness.engine.summon import Summon, refuse_when_busy, summoned
from harness.engine.wrap import WrapFunction, WrapPolicy, as_policy, candidates, has_forward


class FullyShardedDataParallel(StateFront):
    """Shard ``module`` over the ranks of ``process_group``; every rank calls everything here in step.

    The parameters of ``module`` that no unit below it holds make one group. Gradients are the mean over
    ranks. The arguments are torch's; those that are not built raise NotImplementedError when given. All ranks
    must start from the same parameters, or pass ``sync_module_states=True``. With ``use_orig_params=False``
    the group's one visible parameter is ``flat_param``; with True the original ones stay, each as the piece
    that this rank holds.

    Raises ValueError or TypeError for what cannot be sharded; the message says what, where, and the cure.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | WrapFunction | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,  # always so: a gather is awaited before the next one starts
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        device_mesh: object = None,
    ) -> None:
        super().__init__()
        construction.refuse_unbuilt(
            param_init_fn=param_init_fn,
            device_mesh=device_mesh,
        )
        _check_module(module)
        ignored = construction.ignored(ignored_modules, ignored_states)
        plan = construction.Plan(
            process_group=construction.default_group(process_group),
            strategy=sharding_strategy or ShardingStrategy.FULL_SHARD,
            mixed_precision=mixed_precision or MixedPrecision(),
            offload=bool(cpu_offload and cpu_offload.offload_params),
            use_orig_params=use_orig_params,
            device=construction.as_device(device_id),
            sync_module_states=sync_module_states,
            ignored_modules=ignored[0],
            ignored_parameters=ignored[1],
        )
        if auto_wrap_policy is not None:
            _wrap_below(module, as_policy(auto_wrap_policy), plan)
        self._finish(module, plan)

    def _finish(self, module: nn.Module, plan: construction.Plan) -> None:
        self._unit = construction.build_unit(module, plan, _is_wrapper)
        self.add_module(_INNER, module)
        if self._unit.group and not plan.use_orig_params:
            self._unit.group.shard.register_flat(Slot(self, _FLAT))
        tree = Tree([wrapper._unit for _, wrapper in _wrappers(self)])
        for unit in tree.units:
            unit.join(tree)
        self._register_state_hooks()

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[_INNER]
        assert inner is not None
        return inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        unit, tree = self._unit, self._unit.tree
        tree.enter_forward()
        try:
            args, kwargs = unit.before_forward(args, kwargs)
            return unit.after_forward(self.module(*args, **kwargs))
        except BaseException:
            unit.abort_forward()
            raise
        finally:
            tree.leave_forward()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(_INNER)
            if inner is None:
                raise
            return getattr(inner, name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters under the names they have in the unsharded model."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield clean_name(name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield buffers under the names they have in the unsharded model."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield clean_name(name), buffer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward accumulate full gradients on each rank without communication; for the root unit only.

        The next backward outside reduces the sum. Until then `.grad` is this rank's full gradient.
        """
        tree = self._require_root("no_sync")
        previous, tree.sync = tree.sync, False
        try:
            yield
        finally:
            tree.sync = previous

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip all gradients by their norm over all ranks, and return that (0-dim, fp64, equal everywhere).

        For the root unit only, after backward and before the optimizer's step.
        """
        tree = self._require_root("clip_grad_norm_")
        sharded = {e.parameter for u in tree.units if u.group for e in u.group.shard.entries}
        sharded |= {u.group.shard.flat for u in tree.units if u.group}
        others = [parameter for parameter in self.parameters() if parameter not in sharded]
        return clip.clip(tree.units, others, float(max_norm), float(norm_type))

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Let modules see full original parameters (shape and dtype as before sharding) inside the context.

        On exit each rank keeps what its shard holds of them if ``writeback``. Raises RuntimeError inside
        forward, backward or another such context, ValueError for ``writeback`` with ``rank0_only``.
        """
        options = Summon(writeback, rank0_only, offload_to_cpu, with_grads)
        found = [wrapper._unit for _, wrapper in _wrappers(module)]
        if not recurse:
            found = [module._unit] if isinstance(module, FullyShardedDataParallel) else []
        refuse_when_busy(found, "summon_full_params")
        return summoned(found, options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        """Cast or move everything, as `.half()` and `.to()` do: shard, gradients, buffers, units below."""
        group = self._unit.group
        if group is None:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        else:
            group.hide()
            try:
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            finally:
                group.convert(fn)
        self._unit.convert(fn)
        return self

    def _require_root(self, what: str) -> Tree:
        tree = self._unit.tree
        if tree.root is not self._unit:
            raise RuntimeError(
                f"{what} is for the root unit only; this is a unit below it. Call it on the root."
            )
        return tree


def groups(model: nn.Module) -> tuple[GroupInfo, ...]:
    """Show all groups of ``model``, outer before inner, as they are now."""
    return tuple(_info(name, wrapper) for name, wrapper in _wrappers(model) if wrapper._unit.group)


def _info(name: str, wrapper: FullyShardedDataParallel) -> GroupInfo:
    group = wrapper._unit.group
    assert group is not None
    shard, layout = group.shard, group.shard.layout
    gradients = group.gradients.visible()
    return GroupInfo(
        name=name,
        parameters=tuple(f"{name}.{entry.name}" if name else entry.name for entry in shard.entries),
        state=group.state,
        sharding_strategy=group.settings.strategy,
        original_dtype=shard.original_dtype,
        compute_dtype=shard.compute_dtype,
        reduce_dtype=shard.reduce_dtype,
        flat_dtype=shard.flat.dtype,
        gradient_dtype=gradients[0].dtype if gradients else None,
        local_numel=layout.shard_numel,
        full_numel=layout.padded_numel,
        padding=layout.padding,
        local_bytes=shard.flat.numel() * shard.flat.itemsize,
        gathered_bytes=group.gathered_bytes,
        training=wrapper.training,
    )


def _wrappers(model: nn.Module) -> list[tuple[str, FullyShardedDataParallel]]:
    """Return all units of ``model`` with clean names, outer before inner."""
    found = model.named_modules()
    return [(clean_name(name), m) for name, m in found if isinstance(m, FullyShardedDataParallel)]


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got {type(module).__name__}")
    if not has_forward(module):
        raise ValueError(
            f"FullyShardedDataParallel cannot wrap {type(module).__name__}: it has no forward of its own; "
            "wrap what it contains, or the module that contains it."
        )


def _wrap_below(root: nn.Module, policy: WrapPolicy, plan: construction.Plan) -> None:
    """Replace each module that ``policy`` chooses below ``root`` by its unit, inner before outer."""
    left_alone = plan.ignored_modules | {m for _, w in _wrappers(root) for m in w.modules()}
    chosen = policy.choose(root, left_alone)
    precise = _precise(root, left_alone, plan)
    places = _places(root)
    for module in reversed(candidates(root, left_alone)):
        if module in chosen or module in precise:
            unit = _wrap_one(module, chosen.get(module, {}), plan, module in precise)
            for parent, name in places[module]:
                setattr(parent, name, unit)


def _wrap_one(
    module: nn.Module, overrides: Mapping[str, Any], plan: construction.Plan, precise: bool
) -> FullyShardedDataParallel:
    arguments: dict[str, Any] = {
        "process_group": plan.process_group,
        "sharding_strategy": plan.strategy,
        "cpu_offload": CPUOffload(plan.offload),
        "mixed_precision": None if precise else plan.mixed_precision,
        "device_id": plan.device,
        "sync_module_states": plan.sync_module_states,
        "use_orig_params": plan.use_orig_params,
        "ignored_modules": plan.ignored_modules,
        "ignored_states": plan.ignored_parameters,
    }
    unit = FullyShardedDataParallel(module, **{**arguments, **overrides})
    if precise:
        unit._unit.settings = replace(unit._unit.settings, keeps_precision=True)
    return unit


def _precise(root: nn.Module, left_alone: Iterable[nn.Module], plan: construction.Plan) -> set[nn.Module]:
    """Return the modules that compute in full precision although the rest does not, and say so."""
    mixed = plan.mixed_precision
    classes = tuple(mixed._module_classes_to_ignore)
    if mixed.param_dtype is None and mixed.reduce_dtype is None and mixed.buffer_dtype is None:
        return set()
    found = {module for module in candidates(root, set(left_alone)) if isinstance(module, classes)}
    if found:
        names = ", ".join(sorted({type(module).__name__ for module in found}))
        warnings.warn(
            f"MixedPrecision: {names} modules are wrapped as units of their own in full precision "
            "(_module_classes_to_ignore).",
            UserWarning,
            stacklevel=5,
        )
    return found


def _places(root: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return where each module is registered below ``root``; a shared one in several places."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in root.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    return places
