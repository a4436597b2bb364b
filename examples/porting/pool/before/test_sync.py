"""Metrics over ranks: the claims of torchmetrics' tests/unittests/bases/test_ddp.py."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from metric import Mean, gather_uneven

NUM_PROCESSES = 2


def _mean_over_ranks(_):
    metric = Mean()
    metric.update(torch.full((dist.get_rank() + 1,), float(dist.get_rank())))
    assert metric.compute() == pytest.approx(2 / 3)


def _one_rank_without_values(_):
    metric = Mean()
    if dist.get_rank() == 0:
        metric.update(torch.ones(2))
    assert metric.compute() == 1


@pytest.mark.parametrize("process", [_mean_over_ranks, _one_rank_without_values])
def test_mean(process):
    pytest.pool.map(process, range(NUM_PROCESSES))


def _gather(_, lengths):
    gathered = gather_uneven(torch.full((lengths[dist.get_rank()],), float(dist.get_rank())))
    assert [values.tolist() for values in gathered] == [[0.0] * lengths[0], [1.0] * lengths[1]]


@pytest.mark.parametrize("lengths", [(1, 1), (3, 1), (0, 2)])
def test_gather(lengths):
    pytest.pool.map(partial(_gather, lengths=lengths), range(NUM_PROCESSES))
