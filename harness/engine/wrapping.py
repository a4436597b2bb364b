"""Submodules that become units of their own: chosen by a policy, or marked with `wrap`. Runs on ranks."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from lockstep.engine.api import MixedPrecision
from lockstep.engine.config import UnitConfig
from lockstep.engine.materialise import children_first, parents_first

Overrides = Mapping[str, Any]
WrapFunction = Callable[..., bool]
States = Collection[nn.Module | nn.Parameter]
"""Modules and parameters that a policy must not touch: ignored ones, and those in units already."""


class WrapPolicy(Protocol):
    """A choice of the modules that become units."""

    def choose(self, root: nn.Module, ignored: States) -> Mapping[nn.Module, Overrides]:
        """Return the chosen modules below `root`, each with the constructor arguments that differ for it.

        Skip the modules in `ignored` and those below them, and do not count the parameters in it.
        """


@dataclass(frozen=True, init=False)
class ModuleWrapPolicy:
    """Choose every module that is an instance of one of `module_classes`."""

    module_classes: tuple[type[nn.Module], ...]

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        if isinstance(module_classes, type):
            name = module_classes.__name__
            raise TypeError(f"ModuleWrapPolicy: expected classes, got {name} alone; pass {{{name}}}.")
        object.__setattr__(self, "module_classes", tuple(module_classes))

    def choose(self, root: nn.Module, ignored: States) -> Mapping[nn.Module, Overrides]:
        return {m: {} for m in candidates(root, ignored) if isinstance(m, self.module_classes)}


@dataclass(frozen=True)
class CustomPolicy:
    """Choose the modules that `lambda_fn` returns True for, or a dict of constructor arguments."""

    lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]

    def choose(self, root: nn.Module, ignored: States) -> Mapping[nn.Module, Overrides]:
        chosen: dict[nn.Module, Overrides] = {}
        for module in candidates(root, ignored):
            answer = self.lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise ValueError(
                    f"CustomPolicy: the function must return a bool or a dict of arguments, but for "
                    f"{type(module).__name__} it returned {answer!r}"
                )
            if answer:
                chosen[module] = {} if answer is True else answer
        return chosen


@dataclass(frozen=True)
class FunctionPolicy:
    """Choose bottom-up with a function `(module, recurse, nonwrapped_numel) -> bool`.

    With `recurse=True` it returns whether to look below the module, with False whether to choose it. The
    number `nonwrapped_numel` counts the elements of its parameters that are in no chosen module yet.
    """

    function: WrapFunction

    def choose(self, root: nn.Module, ignored: States) -> Mapping[nn.Module, Overrides]:
        taken, chosen = {*ignored}, dict[nn.Module, Overrides]()

        def numel_left(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if p not in taken)

        def visit(module: nn.Module) -> None:
            if not self.function(module=module, recurse=True, nonwrapped_numel=numel_left(module)):
                return
            for child in module.children():
                if child not in ignored and child not in chosen:
                    visit(child)
            may_wrap = module is not root and has_forward(module)
            if may_wrap and self.function(module=module, recurse=False, nonwrapped_numel=numel_left(module)):
                chosen[module] = {}
                taken.update(module.parameters())

        visit(root)
        return chosen


def always_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Make every submodule a unit of its own."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make a unit of each module that `lambda_fn` returns True for."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Make a unit of each instance of a class in `transformer_layer_cls`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Make a unit of each module with at least `min_num_params` elements that are in no unit yet.

    Args:
        force_leaf_modules: Classes whose instances are not looked into. None: multi-head attention.
        exclude_wrap_modules: Classes whose instances are not chosen. None: module lists and dicts.
    """
    leaves = (nn.MultiheadAttention,) if force_leaf_modules is None else tuple(force_leaf_modules)
    excluded = (nn.ModuleList, nn.ModuleDict) if exclude_wrap_modules is None else tuple(exclude_wrap_modules)
    return nonwrapped_numel >= min_num_params and not isinstance(module, leaves if recurse else excluded)


def candidates(root: nn.Module, ignored: States) -> list[nn.Module]:
    """Return the modules below `root` that may become units, parents first."""
    found: dict[nn.Module, None] = {}

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if child not in ignored and child not in found:
                found[child] = None
                walk(child)

    walk(root)
    return [module for module in found if has_forward(module)]


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` can be called; a ModuleList, for one, cannot, so it cannot be a unit."""
    return getattr(module.forward, "__func__", module.forward) is not nn.Module.forward


def as_policy(policy: WrapPolicy | WrapFunction) -> WrapPolicy:
    """Return `policy` itself, or a `FunctionPolicy` of a function in torch's style."""
    if isinstance(policy, type) or not (hasattr(policy, "choose") or callable(policy)):
        raise TypeError(
            f"auto_wrap_policy: expected a wrap policy such as ModuleWrapPolicy({{nn.Linear}}), or a "
            f"function (module, recurse, nonwrapped_numel) -> bool, got {policy!r}"
        )
    return policy if hasattr(policy, "choose") else FunctionPolicy(policy)


MakeUnit = Callable[[nn.Module, Overrides, bool], nn.Module]
"""Make a unit of the module with these constructor arguments; with True, in full precision."""


def wrap_below(
    root: nn.Module, units: Iterable[nn.Module], policy: WrapPolicy, config: UnitConfig, make: MakeUnit
) -> None:
    """Replace each module below `root` that `policy` chooses with its unit; existing `units` stay.

    Classes that mixed precision ignores become units in full precision. Raises ValueError if the policy
    chooses a module inside one of `units`; what is inside ignored modules it has no say in.
    """
    left_alone = set(config.ignored.states)
    below_ignored = {below for module in config.ignored.modules for below in parents_first(module)}
    for unit in units:
        skipped = {*config.ignored.states, *unit.parameters()}
        for module in () if unit in below_ignored else policy.choose(unit, skipped):
            names = (name for name, found in root.named_modules() if found is unit)
            name = next(names, type(unit).__name__)
            raise ValueError(
                f"auto_wrap_policy: it chooses a {type(module).__name__} in {name!r}, which is a "
                f"{type(unit).__name__} already; wrap a module by hand or by policy, not both: leave it out "
                "of the policy, or do not wrap it before."
            )
        left_alone.update(parents_first(unit), unit.parameters())
    chosen = policy.choose(root, left_alone)
    precise = _full_precision_modules(root, config.mixed_precision, left_alone)
    places: defaultdict[nn.Module | None, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in parents_first(root):
        for name, child in parent._modules.items():
            places[child].append((parent, name))  # a shared module has several
    for module in children_first(candidates(root, left_alone)):
        if module in chosen or module in precise:
            unit = make(module, chosen.get(module, {}), module in precise)
            for parent, name in places[module]:
                setattr(parent, name, unit)


def _full_precision_modules(root: nn.Module, mixed: MixedPrecision, left_alone: States) -> set[nn.Module]:
    """Return the modules to wrap in full precision although the rest is not; warn if there are any."""
    if mixed.param_dtype is None and mixed.reduce_dtype is None and mixed.buffer_dtype is None:
        return set()
    classes = tuple(mixed._module_classes_to_ignore)
    found = {module for module in candidates(root, left_alone) if isinstance(module, classes)}
    if found:
        names = ", ".join(sorted({type(module).__name__ for module in found}))
        warnings.warn(
            f"MixedPrecision: {names} modules are wrapped as units of their own in full precision "
            "(_module_classes_to_ignore).",
            UserWarning,
            stacklevel=4,  # the line that calls the wrapper
        )
    return found


# Per thread, and reset when a context ends, by an exception too.
_CURRENT: ContextVar[Callable[..., nn.Module] | None] = ContextVar("enable_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make `wrap` return `wrapper_cls(module, **wrapper_kwargs)` in this thread; the innermost counts."""
    if not callable(wrapper_cls):
        raise TypeError(f"enable_wrap: wrapper_cls must be a class that takes a module, got {wrapper_cls!r}")
    token = _CURRENT.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Return `module`, wrapped by the enclosing `enable_wrap` if any, with `wrap_overrides` on top."""
    current = _CURRENT.get()
    return module if current is None else current(module, **wrap_overrides)
