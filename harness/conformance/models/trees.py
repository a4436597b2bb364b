"""Module trees by description: nested, tied, shared, frozen, of odd sizes, with parts that sit out.

Imports torch only. A description is plain data that prints as the code that makes it; strategies.py draws
such descriptions. Parts have the names that they have in an `nn.Sequential`: `"0"`, `"1.0"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_ROWS = 2


class _Described:
    """Print only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        shown = []
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # of dataclasses only
            value = getattr(self, f.name)
            if f.default is dataclasses.MISSING:
                shown.append(repr(value))
            elif value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the same where a pretty printer, as Hypothesis's, would print every field of a dataclass."""
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Linear(_Described):
    """A square linear layer and a tanh. `tied`: the name of an earlier one, which it shares the weight with.

    `used`, here and below: `"always"`; `"sometimes"`, in every other batch; `"unheard"`, called, but
    what it returns does not reach the loss; `"never"` called at all.
    """

    bias: bool = True
    tied: str | None = None
    frozen: bool = False
    used: str = "always"
    calls: int = 1


@dataclass(frozen=True, repr=False)
class Gain(_Described):
    """A parameter of any shape, also of no element or without dimensions, that scales what comes in."""

    shape: tuple[int, ...] = (1,)
    frozen: bool = False
    used: str = "always"
    calls: int = 1


@dataclass(frozen=True, repr=False)
class Offset(_Described):
    """A buffer, fp32 and not representable in less, that is added to what comes in."""

    used: str = "always"
    calls: int = 1
    frozen = False


@dataclass(frozen=True, repr=False)
class Again(_Described):
    """The very module that has the name `of`, at a second place."""

    of: str
    used: str = "always"
    calls: int = 1
    frozen = False


@dataclass(frozen=True, repr=False)
class Read(_Described):
    """A layer without parameters that reads the weight of the layer `of`, wherever that is."""

    of: str
    used: str = "always"
    calls: int = 1
    frozen = False


@dataclass(frozen=True, repr=False)
class Block(_Described):
    """Parts one after the other; `unit`: to be sharded on its own. `frozen`: all that is in it.

    `recomputed`: by a checkpoint around it, in backward.
    """

    parts: tuple[Part, ...] = field()
    unit: bool = False
    recomputed: bool = False
    frozen: bool = False
    used: str = "always"
    calls: int = 1


Part = Linear | Gain | Offset | Again | Read | Block


@dataclass(frozen=True, repr=False)
class Tree(_Described):
    """A model that maps (2, width) to (2, width), by its parts."""

    width: int
    parts: tuple[Part, ...]

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the submodules that are to be sharded on their own."""
        return tuple(name for name, part in self.named_parts() if isinstance(part, Block) and part.unit)

    def named_parts(self) -> Iterator[tuple[str, Part]]:
        """Yield every part with its name, outer before inner."""
        yield from _named(self.parts)

    def with_units(self, units: Collection[str]) -> Tree:
        """Return the same model with the blocks of these names as units, and no others."""

        def mark(name: str, part: Part) -> Part:
            return replace(part, unit=name in units) if isinstance(part, Block) else part

        return self.with_parts(mark)

    def without_scalars(self) -> Tree:
        """Return the same model with one element in place of parameters without dimensions."""

        def fill(name: str, part: Part) -> Part:
            return replace(part, shape=part.shape or (1,)) if isinstance(part, Gain) else part

        return self.with_parts(fill)

    def with_parts(self, change: Callable[[str, Part], Part]) -> Tree:
        """Return the model of what `change` makes of each part and its name, inner before outer."""
        return replace(self, parts=_changed(self.parts, change))

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model, with values that depend on the seed only."""
        built = _Chain(self.parts, self.width)
        for name, part in self.named_parts():
            if isinstance(part, Linear) and part.tied is not None:
                weight = built.get_submodule(part.tied).get_parameter("weight")
                built.get_submodule(name).register_parameter("weight", weight)
            elif isinstance(part, Again):
                where, _, last = name.rpartition(".")
                built.get_submodule(where)[int(last)] = built.get_submodule(part.of)  # type: ignore[operator]
        for name, part in self.named_parts():
            if isinstance(part, Read):
                built.get_submodule(name).__dict__["targets"] = (built.get_submodule(part.of),)
        for name, part in self.named_parts():
            if part.frozen:
                built.get_submodule(name).requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.uniform_(-1, 1, generator=generator)
        return built

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the parameters of each unit that has some, and of `""`, the root.

        A unit or a parameter with several names has its first.
        """
        built, units = self.build(), {"", *self.units}
        found: dict[str, tuple[str, ...]] = {}
        for name, _ in built.named_parameters():
            owner = max((unit for unit in units if not unit or name.startswith(f"{unit}.")), key=len)
            found[owner] = (*found.get(owner, ()), name)
        return found

    def reads_kept_weights(self, whole: bool, kept: bool) -> bool:
        """Return whether each weight that is read outside its unit is there then, in every forward.

        Args:
            whole: every rank has all of every parameter, in the dtype of computation.
            kept: units keep parameters after their forward; without, they are there in that alone.
        """
        parts = dict(self.named_parts())
        order = list(parts)
        for name, part in parts.items():
            if not isinstance(part, Read) or whole:
                continue
            unit = max((u for u in ("", *self.units) if not u or part.of.startswith(f"{u}.")), key=len)
            around = [each for where, each in parts.items() if _is_within(unit, where)]
            runs = all(each.used in ("always", "unheard") for each in around)
            for place in self._places(name, unit):
                inside = not unit or _is_within(place, unit)
                if not inside and not (kept and runs and order.index(unit) < order.index(place)):
                    return False
        return True

    def _places(self, name: str, unit: str) -> Iterator[str]:
        """Yield where the part `name` is called: in its place, or by an `Again` that does not call `unit`."""
        yield name
        for where, part in self.named_parts():
            if isinstance(part, Again) and _is_within(name, part.of) and not _is_within(unit, part.of):
                yield from self._places(where, unit)

    def has_mixed_groups(self) -> bool:
        """Return whether a group has frozen parameters and others: one flat parameter cannot be both."""
        built = self.build()
        return any(
            len({built.get_parameter(name).requires_grad for name in names}) > 1
            for names in self.groups().values()
        )

    def batch(self, generator: torch.Generator) -> Tensor:
        """Return an input, (2, width), fp32, on the generator's device."""
        return torch.randn(_ROWS, self.width, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of the squared output, fp32."""
        return output.float().square().sum()


class _Chain(nn.Sequential):
    """Parts one after the other. All parts are called with an input and the number of the batch."""

    def __init__(self, parts: tuple[Part, ...], width: int) -> None:
        super().__init__(*(_built(part, width) for part in parts))
        self._parts = parts

    def forward(self, x: Tensor, number: int = 0) -> Tensor:
        for module, part in zip(self, self._parts, strict=True):
            recomputed = isinstance(part, Block) and part.recomputed
            call = partial(checkpoint, module, use_reentrant=False) if recomputed else module
            if part.used == "unheard":
                call(x, number)
            elif part.used == "always" or (part.used == "sometimes" and number % 2):
                for _ in range(part.calls):
                    x = call(x, number)
        return x


class _Linear(nn.Linear):
    def forward(self, x: Tensor, number: int) -> Tensor:  # type: ignore[override]  # one argument more
        return torch.tanh(super().forward(x))


class _Gain(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, number: int) -> Tensor:
        # Every element has another gradient, and x does not grow with the number of calls.
        return x * torch.tanh(1 + self.weight.square().sum())


class _Read(nn.Module):
    # In a tuple, so that the module is not registered at a second place.
    targets: tuple[nn.Module, ...]

    def forward(self, x: Tensor, number: int) -> Tensor:
        weight = self.targets[0].weight
        assert isinstance(weight, Tensor)
        return x * torch.tanh(1 + weight.square().sum())


class _Offset(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((width,), 1 + 2**-12))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return x + self.get_buffer("value").to(x.dtype)


def _built(part: Part, width: int) -> nn.Module:
    match part:
        case Linear():
            return _Linear(width, width, part.bias)
        case Gain():
            return _Gain(part.shape)
        case Offset():
            return _Offset(width)
        case Again():
            return nn.Identity()  # until the module is there
        case Read():
            return _Read()
        case Block():
            return _Chain(part.parts, width)


def _is_within(name: str, outer: str) -> bool:
    """Return whether the part `name` is `outer` or in it."""
    return f"{name}.".startswith(f"{outer}.")


def _named(parts: tuple[Part, ...], prefix: str = "") -> Iterator[tuple[str, Part]]:
    for index, part in enumerate(parts):
        yield f"{prefix}{index}", part
        if isinstance(part, Block):
            yield from _named(part.parts, f"{prefix}{index}.")


def _changed(
    parts: tuple[Part, ...], change: Callable[[str, Part], Part], prefix: str = ""
) -> tuple[Part, ...]:
    """Return what `change` makes of each part and its name, inner before outer."""
    found: list[Part] = []
    for index, part in enumerate(parts):
        name = f"{prefix}{index}"
        if isinstance(part, Block):
            part = replace(part, parts=_changed(part.parts, change, f"{name}."))
        found.append(change(name, part))
    return tuple(found)
