"""A layer that every rank has its own of, amid layers that ranks share. Imports torch only."""

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.conformance.models.delay import pause
from harness.conformance.models.nested import NestedWrappedModule

__all__ = ["DummyDDP", "MixtureOfExperts"]


class Expert(nn.Linear):
    """A linear layer with this rank's values, that may be late to end its forward."""

    def __init__(self, in_features: int, out_features: int, rank: int, delay_before_free_ms: float) -> None:
        super().__init__(in_features, out_features)
        self.delay_before_free_ms = delay_before_free_ms
        generator = torch.Generator().manual_seed(rank)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.3, 0.3, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, in_features) to (batch, out_features)."""
        output = super().forward(x)
        pause(output.device, self.delay_before_free_ms)
        return output


class MixtureOfExperts(NestedWrappedModule):
    """A layer of this rank's own (``expert``) between layers that all ranks share.

    The gradients of shared layers are averaged over ranks, and the expert's are not: an engine shards it over
    a group of this rank alone, and unsharded the model sees to it in `backward`. Take `DummyDDP` around that
    reference; DDP would average the expert too. With ``delay_before_free_ms`` the expert's forward ends late,
    and so its full parameters are freed late.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("module.1", "module.2")
    expert: ClassVar[str] = "module.2"

    def __init__(self, rank: int, delay_before_free_ms: float = 0) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 12),
            nn.Linear(12, 23),
            Expert(23, 12, rank, delay_before_free_ms),
            nn.Linear(12, 8),
        )

    def backward(self, loss: Tensor) -> None:
        """Run backward of ``loss``, and average the gradients of all layers but the expert over all ranks."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.named_parameters():
            if not name.startswith(self.expert) and parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


class DummyDDP(nn.Module):
    """Stand where DDP would, and do nothing: ``module`` averages its gradients itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
