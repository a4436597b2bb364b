"""What the tests of the two composable fronts share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from harness.conformance import Engine


@dataclass(frozen=True)
class Front:
    """One of an engine's two composable fronts. Called with a module it takes this in hand, in place."""

    engine: Engine
    name: str

    def __call__(self, module: nn.Module | list[nn.Module], **settings: Any) -> Any:
        return getattr(self.engine.composable, self.name)(module, **settings)

    def apply(self, model: nn.Module, units: Sequence[str] = (), **settings: Any) -> nn.Module:
        """Take in hand the named submodules, given outer before inner, and then the model itself."""
        for name in reversed(units):
            self(model.get_submodule(name), **settings)
        return self(model, **settings)

    def precision(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the setting that is called ``mp_policy``."""
        return {"mp_policy": self.engine.composable.MixedPrecisionPolicy(*args, **kwargs)}

    @property
    def shards(self) -> bool:
        return self.name == "fully_shard"

    @property
    def placements(self) -> tuple[Shard | Replicate]:
        """Return the placements of a parameter on a mesh of one axis."""
        return (Shard(0) if self.shards else Replicate(),)


@pytest.fixture(params=["fully_shard", "replicate"])
def front(engine: Engine, request: pytest.FixtureRequest) -> Front:
    """Each of the two fronts in turn."""
    return Front(engine, request.param)


@pytest.fixture
def fully_shard(engine: Engine) -> Front:
    """The front that cuts, for claims that make sense for no other."""
    return Front(engine, "fully_shard")


@pytest.fixture
def replicate(engine: Engine) -> Front:
    """The front that copies, for claims that make sense for no other."""
    return Front(engine, "replicate")


@pytest.fixture
def step(world):
    """Run forward and backward on a batch (4, 8) that differs by rank and number; return the loss."""

    def step(model: nn.Module, number: int = 0) -> torch.Tensor:
        batch = torch.randn(
            4, 8, generator=torch.Generator().manual_seed(world.seed + 100 * number + world.rank)
        )
        loss = model(batch.to(world.device)).float().square().sum()
        loss.backward()
        return loss.detach()

    return step
