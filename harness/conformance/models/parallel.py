"""A language model with plans for tensor parallelism. Imports torch."""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

_VOCABULARY = 12
_WIDTH = 6
_LENGTH = 4


class _Block(nn.Module):
    """A residual block of a norm and two linear layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, hidden)
        self.down = nn.Linear(hidden, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + change


class TensorParallelModel(nn.Module):
    """Two residual blocks between an embedding and a head; `plans` say how ranks divide its parameters.

    In the plan "columns" norms and the two ends stay whole, plain tensors. In "sequence" all parameters are
    `DTensor`s, and between the layers each rank has a part of the positions: gradients of the norms are sums
    over ranks that are made when they are reduced. Two ranks have 5 of the 10 `hidden` features each, which
    two more do not divide evenly.
    """

    units: ClassVar[tuple[str, ...]] = ("blocks.0", "blocks.1")
    plans: ClassVar[tuple[str, ...]] = ("columns", "sequence")

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.Sequential(_Block(hidden), _Block(hidden))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits

    def parallelize(self, mesh: DeviceMesh, plan: str) -> Self:
        """Divide parameters over `mesh`, of one axis, in place, by the plan of that name."""
        parallelize_module(self, mesh, _columns() if plan == "columns" else _sequence())
        return self

    @staticmethod
    def batch(generator: torch.Generator, size: int = 4) -> Tensor:
        """Return `size` rows of tokens."""
        return torch.randint(_VOCABULARY, (size, _LENGTH), generator=generator)


def _columns() -> dict[str, ParallelStyle]:
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def _sequence() -> dict[str, ParallelStyle]:
    positions = Shard(1)
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=positions),
        "blocks.*.down": RowwiseParallel(output_layouts=positions),
        "head": ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
    }
