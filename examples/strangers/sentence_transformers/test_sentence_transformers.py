"""Losses of sentence-transformers over pairs of all ranks, in DDP: each rank embeds its rows."""

import functools

import pytest
import torch
from in_ddp import InDDP
from sentence_transformers.sentence_transformer import losses
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from lockstep.layouts import assert_same_as_unsharded

ROWS = 24


class Encoder(nn.Sequential):
    """What a loss takes for a model: of features it returns the same with an embedding."""

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"word": 0})))
    max_seq_length = 8

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, features):
        return {**features, "sentence_embedding": super().forward(features["input_ids"])}


def build():
    return Encoder().double()


def batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield {
            name: torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
            for name in ("anchor", "positive", "negative")
        }


class Call:
    """A loss of a model on a batch, of anchors, positives and, where it takes them, negatives."""

    def __init__(self, name, gathered):
        make, options, self.columns = (LOSSES | WITH_ANCHORS)[name]
        options = {"gather_across_devices": gathered, **options}
        if "GIST" in make.__name__:
            options["guide"] = Encoder(seed=1).double().requires_grad_(False)
        self.loss = make(build(), **options)

    def __call__(self, model, batch):
        self.loss.model = model
        return self.loss([{"input_ids": batch[name]} for name in self.columns], None)


PAIRS, TRIPLES = ("anchor", "positive"), ("anchor", "positive", "negative")
BOTH_WAYS = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
ALL_WAYS = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
GIST = {"contrast_anchors": False, "temperature": 0.1}
IN_PARTS = {"mini_batch_size": 4}
LOSSES = {
    "ranking": (losses.MultipleNegativesRankingLoss, {}, PAIRS),
    "ranking-negatives": (losses.MultipleNegativesRankingLoss, {}, TRIPLES),
    "ranking-both-ways": (losses.MultipleNegativesRankingLoss, BOTH_WAYS, PAIRS),
    "ranking-all-ways": (losses.MultipleNegativesRankingLoss, ALL_WAYS, TRIPLES),
    **{
        f"ranking-{mode}": (
            losses.MultipleNegativesRankingLoss,
            {"hardness_mode": mode, "hardness_strength": 9.0},
            TRIPLES,
        )
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
    "symmetric": (losses.MultipleNegativesSymmetricRankingLoss, {}, PAIRS),
    "cached": (losses.CachedMultipleNegativesRankingLoss, IN_PARTS, TRIPLES),
    "cached-all-ways": (losses.CachedMultipleNegativesRankingLoss, IN_PARTS | ALL_WAYS, TRIPLES),
    "cached-all_negatives": (
        losses.CachedMultipleNegativesRankingLoss,
        {**IN_PARTS, "hardness_mode": "all_negatives", "hardness_strength": 9.0},
        TRIPLES,
    ),
    "cached-symmetric": (losses.CachedMultipleNegativesSymmetricRankingLoss, IN_PARTS, PAIRS),
    "gist": (losses.GISTEmbedLoss, GIST, TRIPLES),
    "cached-gist": (losses.CachedGISTEmbedLoss, GIST | IN_PARTS, TRIPLES),
}
WITH_ANCHORS = {
    "gist-anchors": (losses.GISTEmbedLoss, GIST | {"contrast_anchors": True}, TRIPLES),
    "cached-gist-anchors": (
        losses.CachedGISTEmbedLoss,
        GIST | IN_PARTS | {"contrast_anchors": True},
        TRIPLES,
    ),
}


def hold(layout, name):
    plan = functools.partial(InDDP, loss=Call(name, gathered=True))
    whole = Call(name, gathered=False)
    assert_same_as_unsharded(layout, build, plan, list(batches()), whole, microbatches=(1, 1, 1))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.layouts(dp=(2, 4))
def test_loss(layout, name):
    hold(layout, name)


@pytest.mark.parametrize("name", WITH_ANCHORS)
@pytest.mark.layouts(dp=(2,))
def test_anchors_meet_those_of_their_own_rank_alone(layout, name):  # see shows_anchors.py
    with pytest.raises(AssertionError, match=r"loss is .*, expected "):
        hold(layout, name)
