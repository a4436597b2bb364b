"""The hooks that torch calls for every optimizer of the process: registered while there are units."""

import gc

import pytest
import torch
from torch import nn
from torch.optim import optimizer

from lockstep.engine import FullyShardedDataParallel, fully_shard

# Fresh processes: no unit of another test has been there.
pytestmark = [
    pytest.mark.ranks(2, fresh=True),
    pytest.mark.parametrize("make", [FullyShardedDataParallel, fully_shard]),
]


def count():
    gc.collect()
    return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)


def test_they_come_with_the_first_unit_and_go_with_the_last(make, world):
    assert count() == (0, 0)
    first = make(nn.Sequential(make(nn.Linear(2, 2)), nn.Linear(2, 2)))
    assert count() == (1, 1)
    second = make(nn.Linear(2, 2))
    assert count() == (1, 1)
    del first
    assert count() == (1, 1)
    del second
    assert count() == (0, 0)


def test_a_model_collected_in_a_step_hook_does_not_break_the_step(make, world):
    models = [make(nn.Linear(2, 2))]

    def last_model_dies(*_):
        models.clear()
        gc.collect()

    optimizer.register_optimizer_step_pre_hook(last_model_dies)
    optimizer.register_optimizer_step_post_hook(last_model_dies)
    plain = nn.Linear(2, 2)
    stepping = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(2)).sum().backward()
    stepping.step()
    models.append(make(nn.Linear(2, 2)))
    assert count() == (2, 2)
    models.clear()
    assert count() == (1, 1)
