"""What a project computes in float32 whatever its parameters are, in float64.

Projects cast to float32 in norms, routers, RoPE and losses, as their alternative is bfloat16. In a float64
model such a cast rounds nine digits away, on each layout in another way: nothing could agree within 1e-12.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class InFloat64(TorchFunctionMode):
    """Takes float32 for float64, and `x.float()` for `x.double()`, in what is called within it, backward too.

    Attributes:
        instead: other arguments to be taken for others, such as the device "cuda" for "cpu".
    """

    def __init__(self, instead=None):
        super().__init__()
        self.instead = {torch.float32: torch.float64, **(instead or {})}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def replace(each):
            return self.instead.get(each, each) if isinstance(each, str | torch.dtype) else each

        if func is torch.Tensor.backward:  # within it the mode would be off
            names = {
                "grad_tensors" if name == "gradient" else name: each for name, each in (kwargs or {}).items()
            }
            with self:
                return torch.autograd.backward(*args, **names)
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*tree_map(replace, args), **tree_map(replace, kwargs or {}))
