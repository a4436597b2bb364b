"""Storage and initial values for modules on the meta device, before their unit shards them. Runs on ranks."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from lockstep.engine.param import ParamRef

ParamInit = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Materialiser:
    """Initialises modules of `unit` by `param_init_fn`, or on `device` by their `reset_parameters`."""

    unit: str
    device: torch.device
    param_init_fn: ParamInit | None
    ignored: Collection[nn.Parameter]

    @torch.no_grad()
    def make(self, modules: Mapping[nn.Module, str]) -> None:
        """Initialise those of `modules`, with their names, that hold something on meta.

        Children come before parents, as their constructors ran in this order. Tied tensors stay tied and get
        the values of the first one. Parameters in `ignored` stay as they are.

        Raises ValueError if a module cannot be initialised, or only by changing others.
        """
        on_meta = {module: list(self._on_meta(module)) for module in modules}
        ties: defaultdict[Tensor, list[ParamRef]] = defaultdict(list)
        for ref in chain.from_iterable(on_meta.values()):
            ties[_tensor(ref)].append(ref)
        for module in children_first(modules):
            if on_meta[module]:
                name, kind = modules[module], type(module).__name__
                self._make_one(module, f"module {name!r} ({kind})" if name else kind)
        for first, *rest in ties.values():
            for ref in rest:
                _replace(ref, _tensor(first))

    def _make_one(self, module: nn.Module, label: str) -> None:
        # A `reset_parameters` may set what is not on meta, such as an ignored parameter with values already.
        on_meta = set(self._on_meta(module))
        kept = [(ref, _tensor(ref), _tensor(ref).data) for ref in _refs(module) if ref not in on_meta]
        if self.param_init_fn:
            with self._refuse_recursion(module, label):
                self.param_init_fn(module)
        else:
            reset = getattr(module, "reset_parameters", None)
            if not callable(reset):
                names = ", ".join(repr(ref.name) for ref in self._on_meta(module))
                raise ValueError(
                    f"{self.unit}: {label} has {names} on the meta device and no reset_parameters; give the "
                    "class one that sets its own parameters and buffers, or pass param_init_fn."
                )
            module.to_empty(device=self.device, recurse=False)
            reset()
        for ref, tensor, data in kept:
            tensor.data = data
            _replace(ref, tensor)
        for ref in self._on_meta(module):
            raise ValueError(
                f"{self.unit}: param_init_fn left {ref.name!r} of {label} on the meta device; it must give "
                "storage and values to all parameters and buffers of the module that it is called with."
            )

    def _on_meta(self, module: nn.Module) -> Iterator[ParamRef]:
        for ref in _refs(module):
            tensor = _tensor(ref)
            if tensor.is_meta and tensor not in self.ignored:
                yield ref

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


def any_on_meta(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of `modules` itself holds something on meta."""
    own = ((*module._parameters.values(), *module._buffers.values()) for module in modules)
    return any(tensor is not None and tensor.is_meta for tensor in chain.from_iterable(own))


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


def parents_first(root: nn.Module) -> list[nn.Module]:
    """Return `root` and all modules below it in the order of `root.modules()`, which spends most on names."""
    found, left = dict[nn.Module, None](), [root]
    while left:
        module = left.pop()
        if module not in found:
            found[module] = None
            left += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


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
