"""Storage and initial values for modules on the meta device, before their unit shards them. Runs on ranks."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.engine.param import ParamRef

ParamInit = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Materialiser:
    """Initialises the modules of one unit that hold something on the meta device.

    It calls `param_init_fn` with each of them, or else gives them storage on `device` and calls their
    `reset_parameters`.
    """

    unit: str
    device: torch.device
    param_init_fn: ParamInit | None
    ignored: Collection[nn.Parameter]

    @torch.no_grad()
    def make(self, modules: Mapping[nn.Module, str]) -> None:
        """Initialise those of `modules`, with their names, that hold something on meta.

        Children come before parents, as their constructors ran in this order. Tied tensors stay tied and get
        the values of the first one. Parameters in `ignored` stay as they are.

        Raises:
            ValueError: If a module cannot be initialised, or only by changing others.
        """
        on_meta = {module: list(self._on_meta(module)) for module in modules}
        tied = _tied(ref for refs in on_meta.values() for ref in refs)
        for module in children_first(modules):
            if on_meta[module]:
                self._make_one(module, _label(modules[module], module))
        for first, *rest in tied:
            for ref in rest:
                _replace(ref, _tensor(first))

    def _make_one(self, module: nn.Module, label: str) -> None:
        with _restored(self._refs_off_meta(module)):
            if self.param_init_fn:
                with self._refuse_recursion(module, label):
                    self.param_init_fn(module)
            else:
                self._reset(module, label)
        for ref in self._on_meta(module):
            raise ValueError(
                f"{self.unit}: param_init_fn left {ref.name!r} of {label} on the meta device; it must give "
                "storage and values to all parameters and buffers of the module that it is called with."
            )

    def _reset(self, module: nn.Module, label: str) -> None:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            names = ", ".join(repr(ref.name) for ref in self._on_meta(module))
            raise ValueError(
                f"{self.unit}: {label} has {names} on the meta device and no reset_parameters; give the "
                "class one that sets its own parameters and buffers, or pass param_init_fn."
            )
        module.to_empty(device=self.device, recurse=False)
        reset()

    def _on_meta(self, module: nn.Module) -> Iterator[ParamRef]:
        for ref in _refs(module):
            tensor = _tensor(ref)
            if tensor.is_meta and tensor not in self.ignored:
                yield ref

    def _refs_off_meta(self, module: nn.Module) -> list[ParamRef]:
        on_meta = set(self._on_meta(module))
        return [ref for ref in _refs(module) if ref not in on_meta]

    @contextmanager
    def _refuse_recursion(self, module: nn.Module, label: str) -> Iterator[None]:
        """Raise ValueError if a tensor below `module` that is initialised has lost its storage."""
        below = [
            (f"{name}.{ref.name}", ref, _tensor(ref), _tensor(ref).data_ptr())
            for name, child in module.named_modules()
            if child is not module
            for ref in _refs(child)
            if not _tensor(ref).is_meta
        ]
        yield
        for name, ref, tensor, memory in below:
            if ref.read() is not tensor or tensor.data_ptr() != memory:
                raise ValueError(
                    f"{self.unit}: param_init_fn, called with {label}, replaced {name!r} below it, which had "
                    "its values already; act on the module itself only: to_empty(..., recurse=False), "
                    "parameters(recurse=False)."
                )


@contextmanager
def _restored(refs: Iterable[ParamRef]) -> Iterator[None]:
    """Restore the tensors of `refs`, and their storage, at the end of the context.

    A `reset_parameters` may set what is not on meta, such as an ignored parameter that has values already.
    """
    before = [(ref, _tensor(ref), _tensor(ref).data) for ref in refs]
    yield
    for ref, tensor, data in before:
        tensor.data = data
        _replace(ref, tensor)


def _refs(module: nn.Module) -> Iterator[ParamRef]:
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield ParamRef(module, name)


def _tensor(ref: ParamRef) -> Tensor:
    tensor = ref.read()
    assert isinstance(tensor, Tensor)
    return tensor


def _replace(ref: ParamRef, tensor: Tensor) -> None:
    # `ParamRef.put` would move it to the end of the parameters, whose order must be the same on all ranks.
    setattr(ref.module, ref.name, tensor)


def _tied(refs: Iterable[ParamRef]) -> list[list[ParamRef]]:
    """Return the refs of each tensor that has several."""
    found: dict[Tensor, list[ParamRef]] = {}
    for ref in refs:
        found.setdefault(_tensor(ref), []).append(ref)
    return [refs for refs in found.values() if len(refs) > 1]


def _label(name: str, module: nn.Module) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else type(module).__name__


def children_first(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return `modules` in the order in which a model is built: children before parents, else as given."""
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
