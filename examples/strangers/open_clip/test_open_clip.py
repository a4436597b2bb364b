"""Losses of OpenCLIP over pairs of all ranks, in DDP: each rank embeds its images and texts."""

import functools

import pytest
import torch
import torch.nn.functional as F
from in_ddp import InDDP
from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss
from torch import nn

from lockstep.layouts import assert_same_as_unsharded

ROWS = 24


class Model(nn.Module):
    """Two encoders, a scale and a bias; `captions` are logits of words, for CoCa."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(5, 6), nn.Linear(4, 6)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(-1.0))
        self.captions = nn.Linear(6, 3 * 7)

    def forward(self, batch):
        image, text = (
            F.normalize(encode(batch[name]), dim=-1)
            for name, encode in (("images", self.image), ("texts", self.text))
        )
        return image, text, self.scale.exp(), self.bias, self.captions(image).unflatten(-1, (3, 7))


def batches(padded=False):
    """Of captions with padding, which is the word 0, or without."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        images, texts, teacher_images, teacher_texts = (
            torch.randn(ROWS, width, generator=generator, dtype=torch.float64) for width in (5, 4, 3, 3)
        )
        words = torch.randint(0 if padded else 1, 7, (ROWS, 3), generator=generator)
        teachers = {"teacher_images": teacher_images, "teacher_texts": teacher_texts}
        yield {"images": images, "texts": texts, "words": words, **teachers}


def build(*unused):
    torch.manual_seed(0)
    model = Model().double()
    for name in unused:
        getattr(model, name).requires_grad_(False)
    return model


def clip(loss, model, batch):
    image, text, scale, *_ = model(batch)
    return loss(image, text, scale)


def siglip(loss, model, batch):
    image, text, scale, bias, _ = model(batch)
    return loss(image, text, scale, bias)


def distill(loss, model, batch):
    image, text, scale, *_ = model(batch)
    return sum(loss(image, text, scale, batch["teacher_images"], batch["teacher_texts"], 2.0))


def coca(loss, model, batch):
    image, text, scale, _, captions = model(batch)
    return sum(loss(image, text, captions, batch["words"], scale))


COCA = functools.partial(CoCaLoss, caption_loss_weight=2.0, clip_loss_weight=1.0)
# How each is called, how it is made, and what of the model it does not use.
LOSSES = {
    "clip": (clip, ClipLoss, ("bias", "captions")),
    "distill": (distill, DistillClipLoss, ("bias", "captions")),
    "coca": (coca, COCA, ("bias",)),
    **{
        way: (siglip, functools.partial(SigLipLoss, dist_impl=way), ("captions",))
        for way in ("bidir", "shift", "reduce", "gather")
    },
}
WITH_GRAD = {"local": {"local_loss": True, "gather_with_grad": True}, "all": {"gather_with_grad": True}}


def hold(layout, name, padded=False, **options):
    call, make, unused = LOSSES[name]
    over_ranks = make(rank=layout.rank, world_size=layout["dp"], **options)
    plan = functools.partial(InDDP, loss=functools.partial(call, over_ranks))
    whole = functools.partial(call, make())
    of_used = functools.partial(build, *unused)
    assert_same_as_unsharded(layout, of_used, plan, list(batches(padded)), whole, microbatches=(1, 1, 1))


@pytest.mark.parametrize("options", WITH_GRAD.values(), ids=WITH_GRAD)
@pytest.mark.parametrize("name", ["clip", "distill", "coca"])
@pytest.mark.layouts(dp=(2, 4))
def test_loss(layout, name, options):
    hold(layout, name, **options)


@pytest.mark.layouts(dp=(2,))
def test_captions_with_padding_are_a_mean_of_means(layout):  # see shows_captions.py
    with pytest.raises(
        AssertionError, match=r"gradient of `captions\.bias` .* is a mean of the means of each dp"
    ):
        hold(layout, "coca", padded=True, **WITH_GRAD["local"])


@pytest.mark.parametrize("way", ["bidir", "shift", "reduce", "gather"])
@pytest.mark.layouts(dp=(2, 3, 4))
def test_sigmoid_loss(layout, way):
    hold(layout, way)
