"""Models of torchvision, of the extra ``test``. Imports torch; torchvision when a model is asked for."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

__all__ = ["resnet50"]


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50 with random weights: 53 batch norms, 25.6 million elements.

    Maps images (batch, 3, height, width) to logits (batch, 1000).
    """
    model: nn.Module = _models().resnet50(weights=None)
    return model


def _models() -> Any:
    try:
        return import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    _declare_operators()
    return import_module("torchvision.models")


@cache  # an operator lives as long as its library
def _declare_operators() -> torch.library.Library:
    """Declare what a torchvision built for another torch asks for when it is imported.

    The registry's build does not load beside a CPU-only torch, and then lacks its own operators. No
    classifier calls these two.
    """
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
