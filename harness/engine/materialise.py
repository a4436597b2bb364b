"""Storage and first values for modules on the meta device, before their unit shards them. Runs on ranks.

Imports torch and engine.parameters only.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.engine.parameters import Slot, children_first

ParamInit = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Materialiser:
    """Make the modules of one unit: by ``param_init_fn``, or on ``device`` by their ``reset_parameters``.

    ``unit``: how error messages call it. What is in ``ignored`` or not on meta stays as it is.
    """

    unit: str
    device: torch.device
    param_init_fn: ParamInit | None
    ignored: Collection[nn.Parameter]

    @torch.no_grad()
    def make(self, modules: Mapping[nn.Module, str]) -> None:
        """Make those of ``modules`` (all that the unit owns, by name) that hold something on meta.

        Children come before parents, as when a model is built. Tied tensors stay tied: the first one's
        values count. Raises ValueError for a module that cannot be made, or only by touching others.
        """
        on_meta = {module: list(self._on_meta(module)) for module in modules}
        tied = _by_tensor(slot for slots in on_meta.values() for slot in slots)
        for module in children_first(modules):
            if on_meta[module]:
                self._make_one(module, _place(modules[module], module))
        for first, *rest in tied:
            for slot in rest:
                _replace(slot, _tensor(first))

    def _make_one(self, module: nn.Module, place: str) -> None:
        with _untouched(self._left_alone(module)):
            if self.param_init_fn:
                with self._no_recursion(module, place):
                    self.param_init_fn(module)
            else:
                self._reset(module, place)
        for slot in self._on_meta(module):
            raise ValueError(
                f"{self.unit}: param_init_fn left {slot.name!r} of {place} on the meta device; it must give "
                "storage and values to all parameters and buffers of the module that it is called with."
            )

    def _reset(self, module: nn.Module, place: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            names = ", ".join(repr(slot.name) for slot in self._on_meta(module))
            raise ValueError(
                f"{self.unit}: {place} has {names} on the meta device and no reset_parameters; give the "
                "class one that sets its own parameters and buffers, or pass param_init_fn."
            )
        module.to_empty(device=self.device, recurse=False)
        reset()

    def _on_meta(self, module: nn.Module) -> Iterator[Slot]:
        for slot in _slots(module):
            tensor = _tensor(slot)
            if tensor.is_meta and tensor not in self.ignored:
                yield slot

    def _left_alone(self, module: nn.Module) -> list[Slot]:
        on_meta = set(self._on_meta(module))
        return [slot for slot in _slots(module) if slot not in on_meta]

    @contextmanager
    def _no_recursion(self, module: nn.Module, place: str) -> Iterator[None]:
        """Raise ValueError if something below ``module`` that has its values has lost their memory."""
        below = [
            (f"{name}.{slot.name}", slot, _tensor(slot), _tensor(slot).data_ptr())
            for name, child in module.named_modules()
            if child is not module
            for slot in _slots(child)
            if not _tensor(slot).is_meta
        ]
        yield
        for name, slot, tensor, memory in below:
            if slot.read() is not tensor or tensor.data_ptr() != memory:
                raise ValueError(
                    f"{self.unit}: param_init_fn, called with {place}, replaced {name!r} below it, which had "
                    "its values already; act on the module itself only: to_empty(..., recurse=False), "
                    "parameters(recurse=False)."
                )


@contextmanager
def _untouched(slots: Iterable[Slot]) -> Iterator[None]:
    """Put the tensors of ``slots`` back, and the memory that they had."""
    before = [(slot, _tensor(slot), _tensor(slot).data) for slot in slots]
    yield
    for slot, tensor, data in before:
        tensor.data = data
        _replace(slot, tensor)


def _slots(module: nn.Module) -> Iterator[Slot]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield Slot(module, name)


def _tensor(slot: Slot) -> Tensor:
    tensor = slot.read()
    assert isinstance(tensor, Tensor)
    return tensor


def _replace(slot: Slot, tensor: Tensor) -> None:
    # Not `Slot.put`: that makes it the module's last parameter, and ranks that had nothing on meta must agree
    # with this one on the order.
    setattr(slot.module, slot.name, tensor)


def _by_tensor(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Return the slots of each tensor that has several."""
    found: dict[Tensor, list[Slot]] = {}
    for slot in slots:
        found.setdefault(_tensor(slot), []).append(slot)
    return [slots for slots in found.values() if len(slots) > 1]


def _place(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
