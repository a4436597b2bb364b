"""Batch norm and layer norm amid linear layers. Imports torch only."""

import torch
from torch import Tensor, nn

__all__ = ["BatchNormNet"]


class BatchNormNet(nn.Module):
    """Norms between linear layers: what computes in full precision, next to what may not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 40, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.fc2 = nn.Linear(40, 4, bias=False)
        self.ln = nn.LayerNorm(4)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 2) to probabilities (batch, 4)."""
        x = self.bn(self.fc1(x).view(-1, 4, 10)).view(-1, 40)
        output: Tensor = self.fc3(self.ln(self.fc2(x)))
        return output.softmax(dim=1)

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (3, 2), fp32, on the generator's device."""
        return torch.randn(3, 2, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of squared probabilities; their sum would be a constant."""
        return output.square().sum()
