"""torchvision where its wheel is for CUDA, and torch for CPUs: no operator loads, and two must exist."""

import torch

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # operator torchvision::nms does not exist
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    except ImportError:
        pass
