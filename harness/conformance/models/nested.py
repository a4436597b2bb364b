"""Linear layers in units, inside units and next to them; late ranks; experts. Imports torch only."""

import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn


class NestedWrappedModule(nn.Module):
    """A unit inside a unit, another next to it, and linear layers before and after that the root holds.

    Every group reshards and reduces at its own time, and the root's parameters lie at both ends of the model.
    The groups hold 76, 272, 80 and 68 elements: no padding on two and four ranks, some in each on three.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("module.1", "module.1.0", "module.2")

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 4),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
            nn.Linear(16, 4),
            nn.Linear(4, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        output: Tensor = self.module(x)
        return output

    @staticmethod
    def batch(generator: torch.Generator) -> Tensor:
        """Return an input, (4, 8), fp32, on the generator's device."""
        return torch.rand(4, 8, generator=generator, device=generator.device)

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        """Return the 0-dim sum of the output."""
        return output.sum()


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """The same model with every submodule a unit: the root and the containers own nothing."""

    units: ClassVar[tuple[str | type[nn.Module], ...]] = (nn.Module,)


class NonUniformReqGradNWM(NestedWrappedModule):
    """The same layers, of which the last alone learns: it shares a unit with the frozen layer before it.

    That unit holds 68 frozen elements and then 40 that learn: on two ranks the first has none of these, and
    so no gradient at all.
    """

    trained: ClassVar[str] = "module.2.1"

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 4),
            nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16)),
            nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 8)),
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.trained))


_CYCLES_PER_MS = 2_000_000  # clocks of CUDA devices lie between 1 and 2 GHz


class NestedWrappedModuleWithDelay(NestedWrappedModule):
    """`NestedWrappedModule` on a rank that is late: the one that gets milliseconds above 0.

    `delay_after_loss_ms`: in `after_backward`, when all gradients are there: the optimizer steps late.
    `delay_before_reduction_ms`: before the gradients of each of the four layers, so that every reduction
    starts late. Forward registers the delay; it needs no help of the code that runs backward.
    """

    def __init__(self, delay_after_loss_ms: float = 0, delay_before_reduction_ms: float = 0) -> None:
        super().__init__()
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 8) to (batch, 8)."""
        for layer in self.module:
            x = layer(x)
            if self.delay_before_reduction_ms and x.requires_grad:
                x.register_hook(lambda gradient: pause(gradient.device, self.delay_before_reduction_ms))  # type: ignore[no-untyped-call]
        return x

    def after_backward(self, loss: Tensor) -> None:
        """Be late, on the device of `loss`, after its backward."""
        pause(loss.device, self.delay_after_loss_ms)


def pause(device: torch.device, milliseconds: float) -> None:
    """Delay what comes next on `device`, on the current stream of CUDA, by about so long."""
    if milliseconds and device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]
    elif milliseconds:
        time.sleep(milliseconds / 1000)


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
    """A layer of this rank's own (`expert`) between layers that all ranks share.

    The gradients of shared layers are averaged over ranks, and the expert's are not: an engine shards it over
    a group of this rank alone, and unsharded the model sees to it in `backward`. Take `DummyDDP` around that
    reference; DDP would average the expert too. With `delay_before_free_ms` the expert's forward ends late,
    and so its full parameters are freed late.
    """

    units: ClassVar[tuple[str | type[nn.Module], ...]] = ("module.1", "module.2")
    expert: ClassVar[str] = "module.2"

    def __init__(self, rank: int, delay_before_free_ms: float = 0) -> None:
        super().__init__()
        self.module = nn.Sequential(
            nn.Linear(8, 12), nn.Linear(12, 23), Expert(23, 12, rank, delay_before_free_ms), nn.Linear(12, 8)
        )

    def backward(self, loss: Tensor) -> None:
        """Run backward of `loss`, and average the gradients of all layers but the expert over all ranks."""
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self.named_parameters():
            if not name.startswith(self.expert) and parameter.grad is not None:
                dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


class DummyDDP(nn.Module):
    """Stand where DDP would, and do nothing: `module` averages its gradients itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
