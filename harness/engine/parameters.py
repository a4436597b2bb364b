"""The parameters of one unit: where modules read them, and what is put there. Imports torch only."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_OWNER = "_lockstep_unit"
_RETIRED = "_lockstep_retired"


class _Claim(str):
    """Say which unit owns what carries this. Copies of that belong to none: they carry an empty claim."""

    def __deepcopy__(self, _: object) -> str:
        return ""

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()


@dataclass(frozen=True)
class Slot:
    """A place where a module reads a parameter or a buffer."""

    module: nn.Module
    name: str

    def read(self) -> object:
        return getattr(self.module, self.name, None)

    def put(self, value: Tensor) -> None:
        """Make the module read ``value``: registered if it is an nn.Parameter, a plain attribute if not.

        Goes through the module's own ``__setattr__`` if it has one: recurrent modules keep a second list.
        """
        plain = type(self.module).__setattr__ is nn.Module.__setattr__
        if plain and self.name in self.module._parameters and isinstance(value, nn.Parameter):
            self.module._parameters[self.name] = value
            return
        self.clear()
        setattr(self.module, self.name, value)

    def clear(self) -> None:
        self.module._parameters.pop(self.name, None)
        self.module.__dict__.pop(self.name, None)


@dataclass(frozen=True)
class Entry:
    """One parameter of a unit. Tied parameters are one entry with several slots.

    ``name`` is relative to the unit's module. ``parameter`` stays the same object for the whole life of the
    unit, so that an optimizer may be built before or after sharding.
    """

    name: str
    parameter: nn.Parameter
    slots: tuple[Slot, ...]
    shape: torch.Size

    @property
    def piece(self) -> Tensor:
        """What the parameter holds between steps: this rank's part."""
        return self.parameter.data

    @property
    def gradient(self) -> Tensor | None:
        """The gradient that the user sees, on this rank."""
        return self.parameter.grad

    def hold(self, piece: Tensor) -> None:
        """Let the parameter be ``piece`` from now on."""
        set_data(self.parameter, piece)

    def show_gradient(self, gradient: Tensor) -> None:
        """Let the user see ``gradient``, which is new and of the piece's shape."""
        attach_gradient(self.parameter, gradient)

    def exchanged(self, found: object) -> "Entry | None":
        """Return the entry for what somebody put in the parameter's place; None if that cannot be."""
        return None

    def put(self, value: Tensor) -> None:
        for slot in self.slots:
            slot.put(value)

    def clear(self) -> None:
        for slot in self.slots:
            slot.clear()


def own_modules(
    root: nn.Module, skip: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) below and including ``root``, not entering modules that ``skip`` picks."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or skip(module):
            return
        seen.add(module)
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk(prefix, root)


def children_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return ``modules`` in the order in which a model is built: children before parents, else as given."""
    given = dict.fromkeys(modules)
    seen, found = set[nn.Module](), list[nn.Module]()

    def visit(module: nn.Module) -> None:
        if module not in seen:
            seen.add(module)
            for child in module.children():
                visit(child)
            if module in given:
                found.append(module)

    for module in given:
        visit(module)
    return found


def collect(modules: Sequence[tuple[str, nn.Module]], ignored: Collection[nn.Parameter]) -> tuple[Entry, ...]:
    """Return one entry per distinct parameter that ``modules`` hold directly and that is not ``ignored``."""
    names: dict[nn.Parameter, str] = {}
    slots: dict[nn.Parameter, list[Slot]] = {}
    for module_name, module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            if is_lazy(parameter):
                raise ValueError(f"parameter {full_name!r} has no shape yet; run a forward before wrapping.")
            names.setdefault(parameter, full_name)
            slots.setdefault(parameter, []).append(Slot(module, name))
    return tuple(Entry(name, p, tuple(slots[p]), p.shape) for p, name in names.items())


def check(entries: Sequence[Entry], unit: str, uniform_requires_grad: bool) -> None:
    """Raise ValueError for parameters that cannot lie in one flat tensor, with their names and the cure."""
    for entry in entries:
        _check_one(entry, unit)
    _check_uniform(entries, unit, "dtype", lambda p: p.dtype, "convert the module to one dtype first")
    _check_uniform(entries, unit, "device", lambda p: p.device, "move the module to one device first")
    if uniform_requires_grad:
        cure = "pass use_orig_params=True, or wrap the frozen modules on their own"
        _check_uniform(entries, unit, "requires_grad", lambda p: p.requires_grad, cure)


def claim(entries: Iterable[Entry], unit: str) -> None:
    """Mark parameters, and modules that hold them, as sharded by ``unit``: a second unit can say so."""
    for entry in entries:
        setattr(entry.parameter, _OWNER, _Claim(f"{entry.name} of {unit}"))
        for slot in entry.slots:
            slot.module.__dict__[_OWNER] = _Claim(unit)


def retire(replaced: Iterable[Tensor], what: str) -> None:
    """Mark tensors that no optimizer should hold, since others get the gradients; messages say ``what``."""
    for tensor in replaced:
        setattr(tensor, _RETIRED, what)


def refuse_retired(optimized: Iterable[Tensor]) -> None:
    """Raise RuntimeError if an optimizer holds what was retired: it would never move."""
    for parameter in optimized:
        if what := getattr(parameter, _RETIRED, None):
            raise RuntimeError(
                f"the optimizer holds {what}, to which no gradient comes. Make it from the "
                "model's parameters() after sharding, and not between unshard and reshard."
            )


def refuse_claimed(modules: Iterable[tuple[str, nn.Module]], entries: Iterable[Entry], unit: str) -> None:
    """Raise ValueError for a module or parameter that another unit shards, with its name and the cure."""
    for name, module in modules:
        if owner := module.__dict__.get(_OWNER):
            place = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(
                f"{unit}: {place} is inside {owner} already; wrap a module once, inner modules before outer "
                "ones: put that unit in its place, or wrap one module that contains all its users."
            )
    for entry in entries:
        _refuse_claimed(entry, unit)


def _refuse_claimed(entry: Entry, unit: str) -> None:
    if owner := getattr(entry.parameter, _OWNER, None):
        raise ValueError(
            f"{unit}: parameter {entry.name!r} is tied to {owner}, which shards it already. "
            "Wrap one module that contains both (or hand fully_shard or replicate a list of the two), and "
            "neither of the two on its own."
        )


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Let ``parameter`` be ``data``, the same object still, also where one of the two is on meta."""
    if parameter.is_meta == data.is_meta:
        parameter.data = data
        return
    # Assigning `.data` cannot change that.
    stand_in = nn.Parameter(data, parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    torch.utils.swap_tensors(parameter, stand_in)  # type: ignore[no-untyped-call]


def attach_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``parameter.grad``, also where shape, dtype or device differ from the parameter's.

    They differ on purpose: inside ``no_sync`` the gradient is unsharded, and with
    ``keep_low_precision_grads`` it has another dtype. torch checks them on assignment only.
    """
    data = parameter.data
    if gradient is not None and (gradient.shape, gradient.dtype, gradient.device) != (
        data.shape,
        data.dtype,
        data.device,
    ):
        parameter.grad = None
        parameter.data = gradient
        parameter.grad = gradient
        parameter.data = data
    else:
        parameter.grad = gradient


def _check_one(entry: Entry, unit: str) -> None:
    parameter = entry.parameter
    where = f"{unit}: parameter {entry.name!r}"
    _refuse_claimed(entry, unit)
    if type(parameter.data) is not Tensor:
        raise NotImplementedError(
            f"{where} is a {type(parameter.data).__name__}; a flat shard holds plain tensors only. "
            "Pass it in ignored_states (fully_shard, replicate: ignored_params)."
        )
    if not parameter.is_floating_point():
        raise ValueError(
            f"{where} has dtype {parameter.dtype}; only floating-point parameters are sharded. "
            "Pass it in ignored_states (fully_shard, replicate: ignored_params)."
        )


def _check_uniform(
    entries: Sequence[Entry], unit: str, what: str, read: Callable[[nn.Parameter], object], cure: str
) -> None:
    """Raise ValueError that names one parameter of each kind when ``read`` differs among ``entries``."""
    examples: dict[object, str] = {}
    for entry in entries:
        examples.setdefault(read(entry.parameter), entry.name)
    if len(examples) > 1:
        found = ", ".join(f"{name!r} has {value}" for value, name in examples.items())
        raise ValueError(f"{unit}: the parameters of one unit must agree in {what}, but {found}; {cure}.")
