"""Put the units that a policy chooses in the place of submodules, inner before outer. Runs on ranks."""

import warnings
from collections.abc import Callable, Mapping

from torch import nn

from harness.engine.construction import Plan
from harness.engine.parameters import children_first
from harness.engine.policy import MixedPrecision
from harness.engine.wrap_policy import Overrides, States, WrapPolicy, candidates

MakeUnit = Callable[[nn.Module, Overrides, bool], nn.Module]
"""Make a unit of the module with these arguments of its own; True: in full precision amid mixed."""


def wrap_below(
    root: nn.Module, policy: WrapPolicy, plan: Plan, units: Mapping[str, nn.Module], make: MakeUnit
) -> None:
    """Replace each module that ``policy`` chooses below ``root`` by its unit.

    ``units`` are those that are there already, by name; they stay, and so does all that plan ignores.
    Raises ValueError if the policy chooses a module inside one of them.
    """
    for name, unit in units.items():
        _refuse_inside(name, unit, policy, plan.ignored.states)
    left_alone = set(plan.ignored.states)
    for unit in units.values():
        left_alone.update(unit.modules(), unit.parameters())
    chosen = policy.choose(root, left_alone)
    precise = _precise(root, plan.mixed_precision, left_alone)
    places = _places(root)
    for module in children_first(candidates(root, left_alone)):
        if module in chosen or module in precise:
            unit = make(module, chosen.get(module, {}), module in precise)
            for parent, name in places[module]:
                setattr(parent, name, unit)


def _refuse_inside(name: str, unit: nn.Module, policy: WrapPolicy, ignored: States) -> None:
    for module in policy.choose(unit, {*ignored, *unit.parameters()}):
        raise ValueError(
            f"auto_wrap_policy: it chooses a {type(module).__name__} in {name!r}, which is a "
            f"{type(unit).__name__} already; wrap a module by hand or by policy, not both: leave it out of "
            "the policy, or do not wrap it before."
        )


def _precise(root: nn.Module, mixed: MixedPrecision, left_alone: States) -> set[nn.Module]:
    """Return the modules that compute in full precision although the rest does not, and say so."""
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
            stacklevel=4,
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
