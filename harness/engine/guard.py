"""Stand-ins for parameters that are sharded while a forward of the root goes on. Runs on ranks.

A module may read a weight of another unit. Where that is sharded then, the reader would compute with one
rank's part: this fails without a hint or, where the shapes fit, trains wrongly. So modules hold stand-ins
there, which have the shape, dtype and device of the whole parameter, but no memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engine.torch_internals import (
    count_as_parameter,
    pytree,
    without_torch_function,
    wrapper_subclass,
)

REMEDIES = (
    "put the module that reads it and the one that holds it into one unit, or let its unit keep parameters "
    "after forward (SHARD_GRAD_OP, NO_SHARD; fully_shard with reshard_after_forward=False, replicate) and "
    "read it after that, in the forward of the root"
)

_ATEN = torch.ops.aten
# These read shape, dtype and device alone.
_FACTORIES = frozenset(
    [
        *(_ATEN.new_empty, _ATEN.new_zeros, _ATEN.new_ones, _ATEN.new_full),
        *(_ATEN.empty_like, _ATEN.zeros_like, _ATEN.ones_like, _ATEN.full_like),
        *(_ATEN.rand_like, _ATEN.randn_like),
    ]
)


class Guard(Tensor):
    """The stand-in for a parameter of `unit`, which `holder` has under `name_there`."""

    __torch_function__ = without_torch_function

    unit: str
    holder: nn.Module
    name_there: str

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.name_there!r} of {self.unit}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return new tensors as from a plain parameter; raise RuntimeError where values would be read."""
        arguments = (args, dict(kwargs or {}))
        if func.overloadpacket in _FACTORIES:
            args, kwargs = pytree.tree_map(lambda v: _plain(v) if isinstance(v, Guard) else v, arguments)
            return func(*args, **kwargs)
        guard = next(v for v in pytree.tree_leaves(arguments) if isinstance(v, Guard))
        raise RuntimeError(guard._refusal(func))

    def _refusal(self, func: object) -> str:
        """Return the name of the parameter, its unit, the module that reads it, and the remedies."""
        running = list(_running_modules())
        roots = [module for module in running if any(self.holder is below for below in module.modules())]
        names = {module: name for name, module in roots[-1].named_modules()} if roots else {}
        where = ".".join(filter(None, (names.get(self.holder), self.name_there)))
        reader = "what no module runs"
        if running:
            name = names.get(running[0])
            reader = f"{name!r} ({type(running[0]).__name__})" if name else type(running[0]).__name__
        return (
            f"parameter {where!r} of {self.unit} is read by {reader} ({func}) while it is sharded, outside "
            f"the forward of its unit. Remedy: {REMEDIES}."
        )


def stand_in(whole: Tensor, trainable: bool) -> Guard:
    """Return a stand-in with the shape, dtype and device of `whole`, which counts as an `nn.Parameter`."""
    about = {"dtype": whole.dtype, "device": whole.device, "requires_grad": trainable}
    guard: Guard = wrapper_subclass(Guard, whole.shape, **about)
    count_as_parameter(guard)
    return guard


def _plain(guard: Guard) -> Tensor:
    return torch.empty((), dtype=guard.dtype, device=guard.device).expand(guard.shape)


def _running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose methods are running in this thread, inner before outer."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module):
            yield found
