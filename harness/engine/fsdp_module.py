"""The class and the methods that `fully_shard` and `replicate` give a module. Runs on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cache, wraps
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.engine import optimizer_hooks
from lockstep.engine.dtensor_param import DTensorParam
from lockstep.engine.gradients import AccumulatedGradients
from lockstep.engine.init import copy_unit
from lockstep.engine.materialise import parents_first
from lockstep.engine.param_group import ParamGroup
from lockstep.engine.root import RootState
from lockstep.engine.state_dict import refuse_when_busy
from lockstep.engine.torch_internals import untraced_itself
from lockstep.engine.unit import Unit


class UnshardHandle:
    """The result of `FSDPModule.unshard` with `async_op`."""

    def __init__(self, group: ParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for unsharded parameters and show them to modules."""
        if self._group:
            self._group.unshard()


class FSDPModule(nn.Module):
    """A module whose own parameters are one group, sharded or replicated; torch's name stands for both.

    Every rank calls everything here in step.
    """

    _composed_unit: Unit
    _composed_modules: tuple[FSDPModule, ...]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain module of the original class, as a slice of an `nn.Sequential` should be."""
        return cls.__mro__[cls.__mro__.index(FSDPModule) + 1](*args, **kwargs)

    @untraced_itself
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._composed_unit.run(self, super().__call__, args, kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard parameters, until `reshard` or as long as the next forward retains them.

        With `async_op` only start the all-gather, and return a handle to wait for it.
        """
        if group := self._composed_unit.group:
            group.prefetch()
            group.pin()
            if not async_op:
                group.unshard()
        return UnshardHandle(group) if async_op else None

    def reshard(self) -> None:
        """Reshard parameters; what was changed in unsharded ones is lost."""
        if self._composed_unit.group:
            self._composed_unit.group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients, or accumulates them on each rank, in the reduce dtype.

        The next backward that reduces, reduces the sum. `zero_grad` does not see accumulated gradients;
        `reset_iter_state` forgets them.
        """
        for unit in self._units(recurse):
            unit.options.sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are also reduced across replicas, or wait after the reduction inside one.

        The next backward that reduces across replicas, reduces the sum. With one replica nothing changes.
        """
        for unit in self._units(recurse):
            if gradients := _gradients(unit):
                gradients.across = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: every backward ends with its reductions done."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether backward reshards parameters, or leaves unsharded ones to the next forward.

        That uses them, unless an optimizer has stepped or the parameters have changed in place since.
        Changes through `.data` or by `torch._foreach_*` leave no trace: call `reshard` after them.
        """
        for unit in self._units(recurse):
            unit.options.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards parameters; it need not if it reads none, as that of an embedding.

        If it does read one without, it reads freed memory, as it does with torch: an error, or a crash.
        """
        self._composed_unit.options.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the next forward of the root wait for `event`, such as the end of a step on another stream.

        All-gathers always come after what the current stream has been given before.
        """
        self._composed_unit.root_state.event = event

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by `factor`, instead of by the number of ranks.

        Raises:
            ValueError: `factor` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor: expected a positive number, got {factor!r}")
        if gradients := _gradients(self._composed_unit):
            gradients.divisor = float(factor)

    def reset_iter_state(self) -> None:
        """Forget the unfinished parts of a step: gradients that are not reduced, unsharded parameters.

        A forward or backward that raises does the same. Gradients that the user sees stay.
        """
        refuse_when_busy([self._composed_unit], "reset_iter_state")
        for unit in self._composed_unit.root_state.units:
            if unit.group:
                unit.group.reshard()
                unit.group.gradients.drop_accumulated()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether forward reshards parameters, or retains unsharded ones for backward.

        Args:
            recurse: also of the groups below.

        Raises:
            TypeError: a number of ranks, which only `fully_shard` takes.
        """
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"set_reshard_after_forward: expected a bool, got {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.options.reshard_after_forward = reshard_after_forward
            unit.options.reshard_to = None

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch the groups of `modules` when this forward begins, in place of the guessed next one.

        Raises:
            ValueError: one of them is no module of `fully_shard` or `replicate`.
        """
        self._composed_unit.options.forward_prefetch = _groups_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch the groups of `modules` before these gradients, in place of the guessed next one.

        Raises:
            ValueError: one of them is no module of `fully_shard` or `replicate`.
        """
        self._composed_unit.options.backward_prefetch = _groups_of(modules)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FSDPModule:
        rest = super()._apply
        self._composed_unit.apply(fn, lambda: rest(fn, recurse))  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._show_shards("state_dict")
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._show_shards("load_state_dict")
        super()._load_from_state_dict(*args, **kwargs)

    def _show_shards(self, what: str) -> None:
        refuse_when_busy([self._composed_unit], what)
        self.reshard()

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPModule:
        """Copy on this rank alone, without communication; as with any module, gradients are left out."""
        unit, modules = self._composed_unit, self._composed_modules
        refuse_when_busy([unit], "copy.deepcopy")
        self.reshard()
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for param in unit.group.shard.params if unit.group else ():
            assert isinstance(param, DTensorParam)
            memo.setdefault(id(param.parameter), param.copy().parameter)
        own = ("_composed_unit", "_composed_modules")
        vars(copied).update({k: deepcopy(v, memo) for k, v in vars(self).items() if k not in own})
        copies = deepcopy(modules, memo)
        # The last of the modules that share the unit does it, when all have been filled.
        if "_composed_unit" not in vars(copied) and all("_modules" in vars(module) for module in copies):
            adopt(copies, copy_unit(unit, memo))
        return copied

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can be neither pickled (torch.save) nor copied by copy.copy, because it "
            "belongs to a running process group; save its state_dict(), or use copy.deepcopy."
        )

    def _units(self, recurse: bool) -> Iterator[Unit]:
        return units_of(self._composed_modules) if recurse else iter([self._composed_unit])


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make the method of `module` unshard and reshard as its forward does; other modules stay as they are.

    Raises:
        ValueError: the class of `module`, one of `fully_shard` or `replicate`, has no method `method_name`.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(type(module), method_name, None)
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
        )

    @untraced_itself
    @wraps(method)
    def unsharding(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return self._composed_unit.run(self, MethodType(method, self), args, kwargs)

    setattr(module, method_name, MethodType(unsharding, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Do nothing but check `modules`: those of one process group share its streams without it."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"share_comm_ctx: expected modules of fully_shard or replicate, got {module!r}")


@cache
def class_of(cls: type[nn.Module], prefix: str) -> type[FSDPModule]:
    """Return the `FSDPModule` that modules of class `cls` become, the same one every time."""
    return type(f"{prefix}{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


def adopt(modules: Sequence[FSDPModule], unit: Unit) -> None:
    """Make `unit` drive `modules` and be the root of all units below them."""
    for module in modules:
        module._composed_unit = unit
        module._composed_modules = tuple(modules)
    unit.num_modules = len(modules)
    optimizer_hooks.watch(RootState([*units_of(modules)]))


def units_of(modules: Iterable[nn.Module]) -> Iterator[Unit]:
    """Return each unit of `modules` and below once, outer before inner."""
    found = (module for root in modules for module in parents_first(root))
    return iter(dict.fromkeys(m._composed_unit for m in found if isinstance(m, FSDPModule)))


def _gradients(unit: Unit) -> AccumulatedGradients | None:
    if unit.group is None:
        return None
    assert isinstance(unit.group.gradients, AccumulatedGradients)
    return unit.group.gradients


def _groups_of(modules: Iterable[FSDPModule]) -> list[ParamGroup]:
    modules = list(modules)
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"only modules of fully_shard or replicate are prefetched, not {module!r}")
    return [module._composed_unit.group for module in modules if module._composed_unit.group]
