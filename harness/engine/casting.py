"""Casts of what goes through a unit: tensors in arguments and results, and buffers. Runs on ranks."""

import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lockstep.engine.param import ParamRef
from lockstep.engine.torch_internals import pytree, untraced

Parts = Mapping[Any, Any]


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return `tree` with `fn` applied to each tensor in nested containers, dataclasses included.

    A container with a changed tensor comes back as a copy; everything else is the same object as before.
    """
    if isinstance(tree, Tensor):
        return fn(tree)
    parts, rebuild = _take_apart(tree)
    mapped = {key: map_tensors(fn, part) for key, part in parts.items()}
    return tree if all(mapped[key] is part for key, part in parts.items()) else rebuild(mapped)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`, in the order that `map_tensors` visits them."""
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in _take_apart(tree)[0].values() for tensor in tensors(part)]


def cast_floating(dtype: torch.dtype, tree: Any) -> Any:
    """Return `tree` with its floating-point tensors in `dtype`; autograd casts gradients back."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _take_apart(tree: Any) -> tuple[Parts, Callable[[Parts], Any]]:
    """Return the parts of `tree`, none if it is no container, and a function that rebuilds it from parts."""
    if fields := getattr(tree, "_fields", ()) if isinstance(tree, tuple) else ():
        # torch requires the batch sizes of a packed sequence on CPU.
        skipped = "batch_sizes" if isinstance(tree, PackedSequence) else None
        named = _attributes(tree, (name for name in fields if name != skipped))
        return named, lambda parts: tree._replace(**parts)
    if not pytree.tree_is_leaf(tree):
        children, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
        return dict(enumerate(children)), lambda parts: pytree.tree_unflatten(parts.values(), spec)
    # pytree takes dataclasses and subclasses of containers for leaves.
    if isinstance(tree, dict | list):
        items = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
        return items, lambda parts: _copy_with(operator.setitem, tree, parts)
    if isinstance(tree, tuple):
        return dict(enumerate(tree)), lambda parts: type(tree)(parts.values())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | nn.Module):
        # dataclasses.replace would call the constructor, which may take other arguments than the fields.
        # object.__setattr__ works for frozen dataclasses, too.
        named = _attributes(tree, (field.name for field in dataclasses.fields(tree)))
        return named, lambda parts: _copy_with(object.__setattr__, tree, parts)
    return {}, lambda _: tree


def _attributes(value: Any, names: Iterable[str]) -> Parts:
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _copy_with(put: Callable[[Any, Any, Any], object], value: Any, parts: Parts) -> Any:
    copied = copy.copy(value)
    for key, part in parts.items():
        put(copied, key, part)
    return copied


class BatchNormCast:
    """Hooks that let a BatchNorm1d on CPU have parameters in low precision beside buffers in fp32.

    GPUs have a kernel for that, which computes in fp32. That of CPUs refuses it, but takes an input in low
    precision with parameters and buffers in fp32: so the module has copies of its parameters in its forward.
    """

    def __init__(self, module: nn.BatchNorm1d) -> None:
        self._own: dict[ParamRef, Tensor] = {}
        module.register_forward_pre_hook(self._cast)
        module.register_forward_hook(self._restore, always_call=True)

    @untraced
    def _cast(self, module: nn.Module, _: object) -> None:
        mean = module._buffers.get("running_mean")
        if mean is None or mean.dtype != torch.float32 or mean.device.type != "cpu":
            return
        refs = [ParamRef(module, name) for name in ("weight", "bias")]
        own = {ref: value for ref in refs if isinstance(value := ref.read(), Tensor)}
        low = {value.dtype for value in own.values()} - {mean.dtype}
        if low:
            warnings.warn(
                f"{type(module).__name__}: on CPU it computes with {mean.dtype} copies of its parameters in "
                f"{low.pop()}, as its buffers are in {mean.dtype}; GPUs do so in their kernel.",
                UserWarning,
                stacklevel=2,
            )
            self._own = own
            for ref, value in own.items():
                ref.put(value.to(mean.dtype))

    @untraced
    def _restore(self, *_: object) -> None:
        for ref, value in self._own.items():
            ref.put(value)
        self._own = {}


@dataclasses.dataclass(eq=False)
class Buffers:
    """The buffers of one unit, cast for computation.

    Attributes:
        goes_back: Keep the values before a cast as well: a buffer that did not change while it was cast goes
            back to every bit it had, and not to rounded values.
        dtypes: The dtypes of cast buffers before the cast, in which `state_dict` saves them.
    """

    refs: Sequence[ParamRef]
    goes_back: bool
    dtypes: dict[ParamRef, torch.dtype] = dataclasses.field(default_factory=dict)
    _values: dict[ParamRef, Tensor] = dataclasses.field(default_factory=dict)

    def prepare(self, dtype: torch.dtype | None, device: torch.device | None) -> None:
        """Cast floating-point buffers to `dtype`, or back for None, and move all buffers to `device`."""
        # A tensor that is made in inference mode cannot be written to in training.
        with torch.inference_mode(False), torch.no_grad():
            for ref in self.refs:
                buffer = ref.module._buffers.get(ref.name)
                if buffer is not None:
                    buffer = self._cast(ref, buffer, dtype) if buffer.is_floating_point() else buffer
                    ref.module._buffers[ref.name] = buffer.to(device or buffer.device)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply a cast of the module, such as `half()`, to the dtypes that buffers are restored to."""
        self.dtypes = {ref: fn(torch.empty(0, dtype=dtype)).dtype for ref, dtype in self.dtypes.items()}

    def _cast(self, ref: ParamRef, buffer: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype and buffer.dtype != dtype:
            self.dtypes[ref] = buffer.dtype
            if self.goes_back:
                self._values[ref] = buffer
            return buffer.to(dtype)
        if dtype or not self.dtypes:  # without earlier casts, the usual case in a step, nothing to restore
            return buffer
        value = self._values.pop(ref, None)
        if value is not None and torch.equal(value.to(buffer.device, buffer.dtype), buffer):
            buffer = value.to(buffer.device)  # the module may have been moved since
        return buffer.to(self.dtypes.get(ref, buffer.dtype))
