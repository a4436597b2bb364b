"""An unsharded reference that computes as mixed precision makes an engine compute. Inside a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from lockstep.assertions.parity import Trainee, named_gradients, named_parameters


def unsharded_with_casts(
    bare: nn.Module,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    full_precision_classes: tuple[type[nn.Module], ...] = (),
) -> Trainee:
    """Return `bare` with casts at each forward and in each reduction; `bare` itself is not cast.

    Its backward replaces the gradient of every parameter by the mean over the ranks of the default group,
    summed in fp32 or fp64 and rounded once.

    Args:
        bare: a model with parameters and buffers that keep their dtypes between forwards.
        param_dtype: dtype of parameters and floating-point arguments inside forward and backward.
        reduce_dtype: dtype of gradients as they are reduced; None is `param_dtype`.
        buffer_dtype: dtype of floating-point buffers inside forward; what forward writes to them is lost.
        full_precision_classes: modules below `bare` that are not cast: they take their one argument in
            the dtype of their weight and return their output in `param_dtype`.
    """
    cast = _Cast(bare, param_dtype, buffer_dtype, full_precision_classes)

    def backward(_: nn.Module, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for name, leaf in cast.leaves.items():
            parameter = bare.get_parameter(name)
            dtype = None if cast.is_kept(name) else reduce_dtype or param_dtype
            reduced = None if leaf.grad is None else _mean(leaf.grad.to(dtype or leaf.dtype))
            parameter.grad = None if reduced is None else reduced.to(parameter.dtype)

    return Trainee(cast, lambda _: named_parameters(bare), lambda _: named_gradients(bare), backward)


class _Cast(nn.Module):
    """Call `bare` with everything cast that is not of a module of `kept` classes.

    `leaves`: the parameters of the last forward, by name; backward gives gradients to them, not to `bare`.
    """

    def __init__(
        self,
        bare: nn.Module,
        param_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        kept: tuple[type[nn.Module], ...],
    ) -> None:
        super().__init__()
        self.bare = bare
        self._param_dtype, self._buffer_dtype = param_dtype, buffer_dtype
        modules = {name: module for name, module in bare.named_modules() if isinstance(module, kept)}
        self.leaves: dict[str, Tensor] = {}
        self._kept = tuple(f"{name}." for name in modules)
        for module in modules.values():
            module.register_forward_pre_hook(lambda m, args: _cast(args, m.weight.dtype))
            module.register_forward_hook(lambda m, args, output: _cast(output, param_dtype))

    def forward(self, *args: Any) -> Any:
        parameters = dict(self.bare.named_parameters())
        cast = self._casts({n: p.detach() for n, p in parameters.items()}, self._param_dtype)
        self.leaves = {n: leaf.requires_grad_(parameters[n].requires_grad) for n, leaf in cast.items()}
        buffers = self._casts(dict(self.bare.named_buffers()), self._buffer_dtype)
        return functional_call(self.bare, {**self.leaves, **buffers}, _cast(args, self._param_dtype))

    def is_kept(self, name: str) -> bool:
        return name.startswith(self._kept)

    def _casts(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        return {n: t if self.is_kept(n) else _cast(t, dtype) for n, t in tensors.items()}


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return `value`, or each tensor of a tuple, in `dtype` if it is floating-point."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if dtype and value.is_floating_point() else value


def _mean(gradient: Tensor) -> Tensor:
    of_ranks = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, gradient.contiguous())
    precise = torch.promote_types(gradient.dtype, torch.float32)
    return torch.stack(of_ranks).mean(0, dtype=precise).to(gradient.dtype)
