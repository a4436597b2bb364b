"""The wrapper front: `FullyShardedDataParallel`, with PyTorch's public names. Runs on ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.engine import init, mesh, optimizer_hooks
from lockstep.engine.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from lockstep.engine.config import Ignored, UnitConfig
from lockstep.engine.grad_scaler import clip_gradients
from lockstep.engine.materialise import parents_first
from lockstep.engine.mesh import ProcessGroups
from lockstep.engine.param import FLAT as _FLAT
from lockstep.engine.param import INNER as _INNER
from lockstep.engine.param import ParamRef, joined
from lockstep.engine.root import RootState
from lockstep.engine.state_dict import Summon, refuse_when_busy, summoned
from lockstep.engine.torch_internals import untraced_itself
from lockstep.engine.wrapper_state import WrapperState
from lockstep.engine.wrapping import MakeUnit, WrapFunction, WrapPolicy, as_policy, wrap_below


class FullyShardedDataParallel(WrapperState):
    """Shard `module` over the ranks of `process_group`; every rank calls everything here in step.

    The parameters of `module` that no unit below it holds make one group. Gradients are the mean over
    ranks. The arguments are those of torch's class of this name. All ranks
    must start from the same parameters, or pass `sync_module_states=True`. With `use_orig_params=False`
    the group's one visible parameter is `flat_param`; with True the original ones stay, each as the piece
    that this rank holds: 1-D, so group them for weight decay by name, not by `ndim`.

    Make the optimizer after wrapping: with `use_orig_params=False` one made before holds parameters that
    get no gradients any more, and refuses to step.

    Call the unit, not the module in it: only the unit unshards. Ranks compare what they wrap, and raise when
    it differs.

    For each module with parameters or buffers of its own on the meta device `param_init_fn` is called, and
    must set those alone; without it they get memory, and their `reset_parameters` is called. Each unit does
    so right before it shards. What `ignored_modules` or `ignored_states` name stays as it is, but for units
    below it, which stay units.

    With `full_precision_in_eval` (None: if the environment has FSDP_USE_FULL_PREC_IN_EVAL=1)
    `mixed_precision` holds only while `module.training`. Else parameters, the gradients of such a forward
    and buffers have their original dtypes, and arguments stay as they are; but a unit in eval below a root
    that is not casts arguments up, and results back to what came in. A buffer that was not changed while it
    was cast goes back to every bit it had, another to its value in the low precision.

    Args:
        process_group: The ranks that share the model, or the pair (shard, replicate) of a hybrid strategy;
            None: all ranks. `device_mesh`, of one axis or of two (replicate, shard), takes its place.
        sharding_strategy: None: FULL_SHARD.
        cpu_offload: None: shards rest where `device_id` says.
        auto_wrap_policy: Chooses modules below that become units with the same arguments; None: none.
        backward_prefetch: When backward gathers the next group; None: when it is needed.
        forward_prefetch: Gather the group that is expected next while the forward of this one runs.
        device_id: Where to compute: an index, a device or its name; None: where the parameters are.
        limit_all_gathers: Has no effect: one all-gather at a time is in flight ahead of its use.

    Raises:
        ValueError, TypeError: For what cannot be sharded; the message says what, where, and the remedy.
        NotImplementedError: For parameters that are DTensors or of another subclass of Tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroups | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: WrapPolicy | WrapFunction | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,  # always: one all-gather is prefetched at a time
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        device_mesh: DeviceMesh | None = None,
        full_precision_in_eval: bool | None = None,
    ) -> None:
        super().__init__()
        for name, kind, given in (
            ("sharding_strategy", ShardingStrategy, sharding_strategy),
            ("cpu_offload", CPUOffload, cpu_offload),
            ("mixed_precision", MixedPrecision, mixed_precision),
            ("backward_prefetch", BackwardPrefetch, backward_prefetch),
        ):
            if given is not None:
                init.check_type(kind, f"{name}: expected None or a", given)
        if param_init_fn is not None and not callable(param_init_fn):
            raise TypeError(f"param_init_fn: expected a function that takes a module, got {param_init_fn!r}")
        init.check_module(module, FullyShardedDataParallel)
        policy = None if auto_wrap_policy is None else as_policy(auto_wrap_policy)
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        groups = mesh.resolve(strategy, process_group, device_mesh)
        units = _wrappers(module)
        alone = init.resolve_ignored(module, ignored_modules, ignored_states, _is_wrapper)
        config = UnitConfig(
            name=f"FullyShardedDataParallel({type(module).__name__})",
            strategy=strategy,
            mesh=mesh.MeshInfo.of(strategy, groups, device_mesh),
            mixed_precision=mixed_precision or MixedPrecision(),
            device=mesh.as_device(device_id, groups),
            offload=bool(cpu_offload and cpu_offload.offload_params),
            use_orig_params=use_orig_params,
            forward_prefetch=forward_prefetch,
            backward_prefetch=backward_prefetch,
            full_precision_in_eval=init.full_precision_in_eval(full_precision_in_eval),
            ignored=alone.union([unit._ignored for unit in units]),
            param_init_fn=param_init_fn,
            sync_module_states=sync_module_states,
        )
        if policy is not None:
            wrap_below(module, units, policy, config, _below(config))
        self._unit = init.build_unit([module], config, _is_wrapper)
        self._ignored: Ignored = config.ignored
        self.add_module(_INNER, module)
        self._join(use_orig_params)
        self._register_state_hooks()

    def _join(self, use_orig_params: bool) -> None:
        """Show the flat parameter if the originals are not, and be the root of all units below."""
        if self._unit.group and not use_orig_params:
            self._unit.group.shard.register_flat(ParamRef(self, _FLAT))
        optimizer_hooks.watch(RootState([wrapper._unit for wrapper in _wrappers(self)]))

    @untraced_itself
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._unit.run(self.module, self.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get(_INNER)
            if inner is None:
                raise
            return getattr(inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute that reading `name` reads: the wrapped module's, unless the unit has one."""
        inner = self.__dict__.get("_modules", {}).get(_INNER)
        if inner is None or self._has_own(name) or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def _has_own(self, name: str) -> bool:
        if name.startswith("_") or name == _FLAT or hasattr(type(self), name):
            return True
        return any(name in own for own in (vars(self), self._parameters, self._buffers, self._modules))

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullyShardedDataParallel":
        """Copy on this rank alone, without communication; as with any module, gradients are left out.

        An optimizer that is copied in the same call drives the copy.
        """
        refuse_when_busy([self._unit], "copy.deepcopy")
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        if self._unit.group and _FLAT in self._parameters:
            # The copy makes its own views of its flat parameter; torch refuses to copy such tensors.
            memo.update((id(view), None) for view in self._unit.group.shard.tracked_views())
        vars(copied).update({k: deepcopy(v, memo) for k, v in vars(self).items() if k != "_unit"})
        copied._unit = init.copy_unit(self._unit, memo)
        copied._join(use_orig_params=_FLAT not in self._parameters)
        return copied

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            f"{self._unit.config.name} can be neither pickled (torch.save) nor copied by copy.copy, because "
            "it belongs to a running process group and owns its module's parameters; save its state_dict() "
            "and load that into a model wrapped again, or use copy.deepcopy."
        )

    def extra_repr(self) -> str:
        """Return how the unit shards and in which dtypes; reads no parameter, so it is safe at any time."""
        unit = self.__dict__.get("_unit")
        return unit.describe() if unit else ""

    def apply(self, fn: Callable[[nn.Module], None]) -> "FullyShardedDataParallel":
        """Call `fn` with every module below and then with this one, with full parameters; keep changes.

        Every rank keeps its own part of what it set. Illegal inside forward, backward and
        `summon_full_params`.
        """
        refuse_when_busy([self._unit], "apply")
        with summoned([self._unit], Summon()):
            return super().apply(fn)

    def check_is_root(self) -> bool:
        """Return whether no unit is above this one; a unit alone is a root."""
        return self._unit.root_state.root is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list["FullyShardedDataParallel"]:
        """Return the units in `module`, itself included, outer before inner; with `root_only` roots."""
        return [unit for unit in _wrappers(module) if unit.check_is_root() or not root_only]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules under the names they have in the unsharded model; unit and wrapped module share one.

        Names of parameters and buffers come from here, for modules around this one as well.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                below = prefix if name == _INNER else joined(prefix, name)
                yield from module.named_modules(memo, below, remove_duplicate)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make backward accumulate full gradients on each rank without communication; for the root unit only.

        The next backward outside reduces the sum. Until then `.grad` is this rank's full gradient, and no
        optimizer may step: its parameters are shards.
        """
        previous = {unit: unit.options.sync for unit in self._require_root("no_sync").units}
        try:
            for unit in previous:
                unit.options.sync = False
            yield
        finally:
            for unit, sync in previous.items():
                unit.options.sync = sync

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip all gradients by their norm over all ranks, and return that (0-dim, fp64, equal everywhere).

        For the root unit only, after backward and before the optimizer's step. Gradients are multiplied by
        max_norm / (norm + 1e-6) if that is below 1, as by `torch.nn.utils.clip_grad_norm_`.

        Args:
            max_norm: Largest norm that is left.
            norm_type: The p of the p-norm over all elements; inf: the largest magnitude.

        Raises:
            RuntimeError: For a unit below the root, or gradients of `no_sync` that are not reduced yet.
        """
        units = self._require_root("clip_grad_norm_").units
        shards = [unit.group.shard for unit in units if unit.group]
        sharded = {param.parameter for shard in shards for param in shard.params}
        sharded.update(shard.flat for shard in shards)
        others = [parameter for parameter in self.parameters() if parameter not in sharded]
        return clip_gradients(units, others, float(max_norm), float(norm_type))

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Show modules full original parameters (shape and dtype as before sharding) inside the context.

        On exit each rank keeps its shard of them, and of gradients `with_grads`, if `writeback`.

        Args:
            module: The units in it, itself included, are shown; without `recurse` its own parameters alone.
            rank0_only: Other ranks take part, and see shards.
            offload_to_cpu: Show them on the CPU, where shards stay on their device.

        Raises:
            RuntimeError: Inside forward, backward or another such context.
            ValueError: For `writeback` with `rank0_only`.
        """
        options = Summon(writeback, rank0_only, offload_to_cpu, with_grads)
        found = [wrapper._unit for wrapper in _wrappers(module)]
        if not recurse:
            found = [module._unit] if isinstance(module, FullyShardedDataParallel) else []
        refuse_when_busy(found, "summon_full_params")
        return summoned(found, options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FullyShardedDataParallel":
        """Cast or move everything, as `.half()` and `.to()` do: shard, gradients, buffers, units below."""
        rest = super()._apply
        self._unit.apply(fn, lambda: rest(fn, recurse))  # type: ignore[no-untyped-call]
        return self

    def _require_root(self, what: str) -> RootState:
        if not self.check_is_root():
            name = self._unit.config.name
            raise RuntimeError(
                f"{what} is for the root unit only; {name} is a unit below it. Call it on the root."
            )
        return self._unit.root_state


def _wrappers(model: nn.Module) -> list[FullyShardedDataParallel]:
    """Return all wrappers in `model`, outer before inner."""
    return [module for module in parents_first(model) if isinstance(module, FullyShardedDataParallel)]


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _below(config: UnitConfig) -> MakeUnit:
    def make(module: nn.Module, overrides: Mapping[str, Any], precise: bool) -> FullyShardedDataParallel:
        arguments: dict[str, Any] = {
            "sharding_strategy": config.strategy,
            "cpu_offload": CPUOffload(config.offload),
            "mixed_precision": config.mixed_precision,
            "param_init_fn": config.param_init_fn,
            "device_id": config.device,
            "sync_module_states": config.sync_module_states,
            "use_orig_params": config.use_orig_params,
            "forward_prefetch": config.forward_prefetch,
            "backward_prefetch": config.backward_prefetch,
            "ignored_states": config.ignored.states,
            "full_precision_in_eval": config.full_precision_in_eval,
        }
        if not overrides.keys() & {"process_group", "device_mesh"}:  # two names of one thing
            given = config.mesh.given
            arguments |= {"device_mesh": given} if given else {"process_group": config.mesh.process_groups}
        full = {"mixed_precision": None} if precise else {}
        unit = FullyShardedDataParallel(module, **{**arguments, **overrides, **full})
        if precise:
            unit._unit.config = replace(unit._unit.config, keeps_precision=True)
        return unit

    return make
