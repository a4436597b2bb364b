"""Metrics over ranks: the claims of torchmetrics' tests/unittests/bases/test_ddp.py."""

import pytest
import torch
from metric import Mean, gather_uneven

pytestmark = pytest.mark.ranks(2)


def test_mean_over_ranks(world):
    metric = Mean()
    metric.update(torch.full((world.rank + 1,), float(world.rank)))
    assert metric.compute() == pytest.approx(2 / 3)


def test_one_rank_without_values(world):
    metric = Mean()
    if world.rank == 0:
        metric.update(torch.ones(2))
    assert metric.compute() == 1


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1), (0, 2)])
def test_gather(world, lengths):
    gathered = gather_uneven(torch.full((lengths[world.rank],), float(world.rank)))
    assert [values.tolist() for values in gathered] == [[0.0] * lengths[0], [1.0] * lengths[1]]
