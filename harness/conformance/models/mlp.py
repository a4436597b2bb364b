"""Two linear layers with a non-linearity after each. Imports torch only."""

import torch
from torch import Tensor, nn

__all__ = ["MLP"]


class MLP(nn.Module):
    """Widen, narrow again, and rectify after both: of a stack of them each is a unit.

    ``dim_multiplier`` 3 gives dimensions that few worlds divide evenly.
    """

    def __init__(self, dim: int, dim_multiplier: int = 4) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, dim) to (batch, dim)."""
        return torch.relu(self.out_proj(torch.relu(self.in_proj(x))))
