"""A transformer with tied weights, and a model of torchvision. Imports torch; torchvision on demand."""

from functools import cache
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor, nn

_VOCABULARY = 23
_WIDTH = 16
_BATCH = 2


class TransformerWithSharedParams(nn.Module):
    """A tied weight at both ends of the model, buffers of two dtypes, batch norm, dropout, integer inputs.

    The root holds the tied embedding and output weight, the norms, and the buffers `vocab_bias` (fp32) and
    `long_buffer`; the encoder layer and the decoder layer are units.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = (
        nn.TransformerEncoderLayer,
        nn.TransformerDecoderLayer,
    )
    vocab_bias: Tensor
    long_buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        # The encoder that a transformer makes warns that nested tensors are off in this order of dimensions.
        layer = nn.TransformerEncoderLayer(_WIDTH, nhead=2, dim_feedforward=8)
        encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(_WIDTH), enable_nested_tensor=False)
        self.transformer = nn.Transformer(
            _WIDTH, nhead=2, num_decoder_layers=1, dim_feedforward=8, custom_encoder=encoder
        )
        self.output_proj = nn.Linear(_WIDTH, _VOCABULARY)
        self.output_proj.weight = self.embed_tokens.weight
        self.register_buffer("vocab_bias", torch.ones(_WIDTH))
        self.register_buffer("long_buffer", torch.zeros(_WIDTH, dtype=torch.long))
        self.bn = nn.BatchNorm1d(_BATCH)

    def forward(self, src_ids: Tensor, tgt_ids: Tensor) -> Tensor:
        """Map token ids (S, 2) and (T, 2), int64, to logits (T, 2, 23)."""
        src = self.embed_tokens(src_ids)
        src = src + self.vocab_bias + self.long_buffer.type_as(src)
        tgt = self.bn(self.embed_tokens(tgt_ids))
        output: Tensor = self.output_proj(self.transformer(src, tgt))
        return output

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return token ids (6, 2) and (4, 2), int64, on the generator's device."""
        src, tgt = (
            torch.randint(_VOCABULARY, (length, _BATCH), generator=generator, device=generator.device)
            for length in (6, 4)
        )
        return src, tgt

    @staticmethod
    def loss(output: Tensor, tgt_ids: Tensor) -> Tensor:
        """Return the 0-dim cross entropy of the logits, summed over tokens."""
        return nn.functional.cross_entropy(output.flatten(0, 1), tgt_ids.flatten(), reduction="sum")


def resnet50() -> nn.Module:
    """Return torchvision's ResNet-50 with random weights: 53 batch norms, 25.6 million elements.

    Maps images (batch, 3, height, width) to logits (batch, 1000).
    """
    try:
        models = import_module("torchvision.models")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _declare_operators()
        models = import_module("torchvision.models")
    model: nn.Module = models.resnet50(weights=None)
    return model


@cache  # an operator lives as long as its library
def _declare_operators() -> torch.library.Library:
    """Declare what a torchvision built for another torch asks for when it is imported.

    The registry's build does not load with a CPU-only torch, and then lacks its operators. No
    classifier calls these two.
    """
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return library
