"""An unsharded reference that computes as mixed precision makes an engine compute. Inside a rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from harness.assertions.parity import Trainee, named_gradients, named_parameters

__all__ = ["ddp_with_casts"]

_COMPRESSED = MappingProxyType({torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook})


def ddp_with_casts(
    bare: nn.Module,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    full_precision_classes: tuple[type[nn.Module], ...] = (),
) -> Trainee:
    """Return ``bare`` under DDP, with casts at each forward and on the wire; ``bare`` itself is not cast.

    Args:
        bare: a model whose parameters and buffers keep their dtypes between forwards.
        param_dtype: of parameters and floating-point arguments inside forward and backward.
        reduce_dtype: of gradients on the wire; None is ``param_dtype``. fp32 or wider means no cast.
        buffer_dtype: of floating-point buffers inside forward; what forward writes to them is lost.
        full_precision_classes: modules, below ``bare``, that take their one argument in the dtype of their
            weight and return what they make of it in ``param_dtype``.
    """
    model = DistributedDataParallel(_Cast(bare, param_dtype, buffer_dtype, full_precision_classes))
    wire = reduce_dtype or param_dtype
    if wire and (hook := _COMPRESSED.get(wire)):
        model.register_comm_hook(None, hook)
    return Trainee(model, lambda _: named_parameters(bare), lambda _: named_gradients(bare))


class _Cast(nn.Module):
    def __init__(
        self,
        bare: nn.Module,
        param_dtype: torch.dtype | None,
        buffer_dtype: torch.dtype | None,
        full_precision_classes: tuple[type[nn.Module], ...],
    ) -> None:
        super().__init__()
        self.bare = bare
        self.param_dtype, self.buffer_dtype = param_dtype, buffer_dtype
        precise = [(n, m) for n, m in bare.named_modules() if isinstance(m, full_precision_classes)]
        self.kept = tuple(f"{name}." for name, _ in precise)
        for _, module in precise:
            module.register_forward_pre_hook(lambda m, args: _cast(args, m.weight.dtype))
            module.register_forward_hook(lambda m, args, output: _cast(output, param_dtype))

    def forward(self, *args: Any) -> Any:
        tensors = self._casts(dict(self.bare.named_parameters()), self.param_dtype)
        tensors |= self._casts(dict(self.bare.named_buffers()), self.buffer_dtype)
        return functional_call(self.bare, tensors, _cast(args, self.param_dtype))

    def _casts(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        return {name: _cast(t, dtype) for name, t in tensors.items() if not name.startswith(self.kept)}


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value``, or each tensor of a tuple, in ``dtype`` if it is floating-point."""
    if isinstance(value, tuple):
        return tuple(_cast(part, dtype) for part in value)
    return value.to(dtype) if dtype and value.is_floating_point() else value
