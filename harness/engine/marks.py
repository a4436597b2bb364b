"""Marks on parameters and modules: the unit that shards them; which no optimizer should hold. On ranks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

OWNER = "_lockstep_unit"
"""The attribute of a module or parameter that carries the name of the unit that shards it."""
_INVALID = "_lockstep_invalid"


class Owner(str):
    """The unit that shards what carries this mark. A copy of that belongs to no unit: its mark is empty."""

    def __deepcopy__(self, _: object) -> str:
        return ""

    def __reduce__(self) -> tuple[type[str], tuple[()]]:
        return str, ()


def invalidate(replaced: Iterable[Tensor], what: str) -> None:
    """Mark tensors that no optimizer should hold, since others get the gradients; messages say `what`."""
    for tensor in replaced:
        setattr(tensor, _INVALID, what)


def refuse_invalidated(optimized: Iterable[Tensor]) -> None:
    """Raise RuntimeError if an optimizer holds what was invalidated: it would never move."""
    for parameter in optimized:
        if what := getattr(parameter, _INVALID, None):
            raise RuntimeError(
                f"the optimizer holds {what}, to which no gradient comes. Make it from the "
                "model's parameters() after sharding, and not between unshard and reshard."
            )
