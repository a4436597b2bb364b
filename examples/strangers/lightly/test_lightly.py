"""Losses of lightly that gather from all ranks, in DDP: each rank embeds its rows, in two views."""

import functools

import pytest
import torch
from in_ddp import InDDP
from in_float64 import InFloat64
from lightly import loss as losses
from torch import nn

from lockstep.layouts import assert_same_as_unsharded

ROWS, WIDTH, REGIONS = 24, 6, 3


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        views = torch.randn(2, ROWS, REGIONS, 5, generator=generator, dtype=torch.float64)
        masks = torch.randint(4, (2, ROWS, REGIONS), generator=generator)
        yield {"a": views[0], "b": views[1], "mask_a": masks[0], "mask_b": masks[1]}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, WIDTH, bias=False)).double()


def views(loss, model, batch):
    return loss(model(batch["a"][:, 0]), model(batch["b"][:, 0]))


def prototypes(loss, model, batch):
    """The views are similarities to prototypes."""
    a, b = model(batch["a"][:, 0]), model(batch["b"][:, 0])
    return loss([a, b], [])


def masked(loss, model, batch):
    """The prototypes are fixed."""
    targets = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).reshape(4, WIDTH)
    return loss(model(batch["a"][:, 0]), model(batch["b"][:, 0]).detach(), prototypes=targets)


def clusters(loss, model, batch):
    return loss(model(batch["b"]).detach(), model(batch["a"]))


def regions(loss, model, batch):
    a, b = model(batch["a"]), model(batch["b"])
    own = (a, b) if isinstance(loss, losses.DetConSLoss) else (a, b, a, b)
    return loss(*own, batch["mask_a"], batch["mask_b"])


def projections(loss, model, batch):
    """Of regions as local views; random directions are the same on all ranks."""
    torch.manual_seed(1)
    local, whole = model(batch["a"]).transpose(0, 1), model(batch["b"][:, :2]).transpose(0, 1)
    found = loss(local_proj=local, global_proj=whole)
    return found if isinstance(found, torch.Tensor) else found.loss


GATHERED = {"gather_distributed": True}
LOSSES = {
    "ntxent": (views, losses.NTXentLoss, GATHERED),
    "directclr": (views, functools.partial(losses.DirectCLRLoss, loss_dim=4), GATHERED),
    "dcl": (views, losses.DCLLoss, GATHERED),
    "vicreg": (views, losses.VICRegLoss, GATHERED),
    "tico": (views, losses.TiCoLoss, GATHERED),
    "swav": (prototypes, losses.SwaVLoss, {"sinkhorn_gather_distributed": True}),
    "msn without regularization": (
        masked,
        functools.partial(losses.MSNLoss, regularization_weight=0),
        GATHERED,
    ),
    "capi": (clusters, losses.CAPILoss, GATHERED),
    "detcons": (regions, losses.DetConSLoss, GATHERED),
    "detconb": (regions, losses.DetConBLoss, GATHERED),
    "lejepa": (projections, losses.LeJEPALoss, GATHERED),
    "visreg": (projections, losses.VISRegLoss, GATHERED),
}


# The option gathers negatives, matrices or targets: of weights, norms and regularization a rank has its own.
OF_A_RANK = {
    "dclw": (views, losses.DCLWLoss, GATHERED),
    "barlow": (views, losses.BarlowTwinsLoss, GATHERED),
    "msn": (masked, losses.MSNLoss, GATHERED),
    "pmsn": (masked, losses.PMSNLoss, GATHERED),
}


class Call:
    """A loss of a model on a batch; made anew for each call, as some keep what they have seen."""

    def __init__(self, name, gathered):
        self.call, make, options = (LOSSES | OF_A_RANK)[name]
        options = options if gathered else dict.fromkeys(options, False)
        self.make = functools.partial(make, **options)

    def __call__(self, model, batch):
        with InFloat64():
            return self.call(self.make(), model, batch)


def hold(layout, name):
    plan = functools.partial(InDDP, loss=Call(name, gathered=True))
    whole = Call(name, gathered=False)
    assert_same_as_unsharded(layout, build, plan, list(batches()), whole, microbatches=(1, 1, 1))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.layouts(dp=(2, 4))
def test_loss(layout, name):
    hold(layout, name)


@pytest.mark.parametrize("name", OF_A_RANK)
@pytest.mark.layouts(dp=(2,))
def test_a_loss_of_which_a_term_is_of_a_ranks_own_rows(layout, name):
    with pytest.raises(AssertionError, match=r"loss is .*, expected "):
        hold(layout, name)
