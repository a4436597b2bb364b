"""What a project computes in float32 whatever its parameters are, in float64.

Projects cast to float32 in norms, routers, RoPE and losses, as their alternative is bfloat16. In a float64
model such a cast rounds nine digits away, on each layout in another way: nothing could agree within 1e-12.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class InFloat64(TorchFunctionMode):
    """Takes float32 for float64, and `x.float()` for `x.double()`, in what is called within it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args, kwargs = tree_map(
            lambda each: torch.float64 if each is torch.float32 else each, (args, kwargs or {})
        )
        return func(*args, **kwargs)
