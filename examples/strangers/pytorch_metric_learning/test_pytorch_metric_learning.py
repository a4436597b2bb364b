"""Losses of pytorch-metric-learning over pairs of all ranks, in DDP: each rank embeds its rows."""

import functools

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.utils import distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.layouts import assert_same_as_unsharded

ROWS = 24
MINERS = {"": None, "hard": miners.BatchHardMiner, "all": functools.partial(miners.MultiSimilarityMiner, 0.1)}
LOSSES = {
    "contrastive": losses.ContrastiveLoss,
    "triplet": losses.TripletMarginLoss,
    "ntxent": losses.NTXentLoss,
    "supcon": losses.SupConLoss,
    "multi-similarity": losses.MultiSimilarityLoss,
    "circle": losses.CircleLoss,
    "lifted": functools.partial(losses.LiftedStructureLoss, neg_margin=1, pos_margin=0),
}


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        rows = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
        yield {"rows": rows, "labels": torch.randint(4, (ROWS,), generator=generator)}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6)).double()


class Loss:
    """A loss of a model on a batch, by pairs that a miner finds, or by all."""

    def __init__(self, loss, miner):
        self.loss, self.miner = LOSSES[loss](), MINERS[miner] and MINERS[miner]()

    def __call__(self, model, batch):
        embedded = model(batch["rows"])
        pairs = self.miner and self.miner(embedded, batch["labels"])
        return self.loss(embedded, batch["labels"], pairs)


class Plan:
    def __init__(self, model, layout, loss, efficient):
        self.layout, self.model = layout, DistributedDataParallel(model)
        self.loss = Loss.__new__(Loss)
        self.loss.loss = distributed.DistributedLossWrapper(loss.loss, efficient=efficient)
        self.loss.miner = loss.miner and distributed.DistributedMinerWrapper(loss.miner, efficient=efficient)

    def __call__(self, batch, microbatches):
        mine = {name: self.layout.slice(each, "dp") for name, each in batch.items()}
        total = self.loss(self.model, mine)
        total.backward()
        total = total.detach().clone()  # multiplied by the number of ranks, as DDP divides by it
        dist.all_reduce(total)
        return total / self.layout["dp"] ** 2


def hold(layout, loss, miner="", efficient=False):
    of_whole = Loss(loss, miner)
    plan = functools.partial(Plan, loss=of_whole, efficient=efficient)
    assert_same_as_unsharded(layout, build, plan, list(batches()), of_whole, microbatches=(1, 1, 1))


@pytest.mark.parametrize("miner", MINERS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.layouts(dp=(2, 4))
def test_loss(layout, loss, miner):
    hold(layout, loss, miner)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.layouts(dp=(2,))
def test_efficient_has_other_gradients_as_documented(layout, loss):
    with pytest.raises(AssertionError, match=r"gradient of `2\.bias` .* differs"):
        hold(layout, loss, efficient=True)
