"""A training of the wrapper is what it was: values within the tolerance, and the collectives exactly."""

import pytest
import torch
from torch import nn

from lockstep.assertions import named_gradients
from lockstep.engine import FullyShardedDataParallel, ShardingStrategy


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_training_of_the_wrapper_is_what_it_was(world, golden, strategy):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    for layer in (0, 2):
        model[layer] = FullyShardedDataParallel(model[layer], sharding_strategy=ShardingStrategy[strategy])
    model = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy[strategy])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Other CPUs and versions of torch add in another order.
    with golden(strategy.lower(), torch.float32) as run:
        for step in range(3):
            inputs = torch.linspace(-1, 1, 24).view(4, 6) * (world.rank + 1) + step / 8
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            run.record("loss", loss)
            run.record("gradient", named_gradients(model))
            optimizer.step()
