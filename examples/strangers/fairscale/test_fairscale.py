"""Fairscale's tensor-parallel layers over tp, with its sharded data parallelism, or torch's, over dp."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.nn.model_parallel import initialize, layers
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.optim import OSS
from torch import nn

from lockstep.layouts import Sharded, ShardMap, assert_same_as_unsharded, witness_batches

VOCAB, WIDTH, INNER, HEADS = 32, 16, 24, 4


class Plain:
    """The layers of the unsharded model: Fairscale's are adapted from them."""

    @staticmethod
    def embedding(**options):
        return nn.Embedding(VOCAB, WIDTH, **options)

    column = row = nn.Linear
    head = functools.partial(nn.Linear, WIDTH, VOCAB, bias=False)


class Vocabulary(Plain):
    """Embedding and head are cut along the vocabulary; activations stay cut between column and row."""

    def __init__(self):
        self.embedding = functools.partial(layers.VocabParallelEmbedding, VOCAB, WIDTH)
        self.column = functools.partial(layers.ColumnParallelLinear, gather_output=False)
        self.row = functools.partial(layers.RowParallelLinear, input_is_parallel=True)
        self.head = functools.partial(self.column, WIDTH, VOCAB, bias=False)


class Gathered(Plain):
    """The embedding is cut along its width; each layer gathers what it gives."""

    def __init__(self):
        self.embedding = functools.partial(layers.ParallelEmbedding, VOCAB, WIDTH)
        self.column, self.row = layers.ColumnParallelLinear, layers.RowParallelLinear
        self.head = functools.partial(self.column, WIDTH, VOCAB, bias=False)


class Model(nn.Module):
    def __init__(self, of, **embedding):
        super().__init__()
        self.embed = of.embedding(**embedding)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.value = of.column(WIDTH, WIDTH), of.column(WIDTH, WIDTH)
        self.key = of.column(WIDTH, WIDTH, bias=False)  # its bias would change nothing
        self.out = of.row(WIDTH, WIDTH)
        self.up, self.down = of.column(WIDTH, INNER), of.row(INNER, WIDTH)
        self.head = of.head()

    def forward(self, tokens):
        x = self.embed(tokens)
        normed = self.norm(x)
        heads = (
            each(normed).unflatten(-1, (-1, WIDTH // HEADS)) for each in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return self.head(self.last(x + self.down(F.gelu(self.up(x)))))


SHARDS = {name: Sharded("tp") for name in ("query.*", "key.weight", "value.*", "up.*", "head.weight")} | {
    name: Sharded("tp", dim=1) for name in ("out.weight", "down.weight")
}
EMBEDDINGS = {Vocabulary: Sharded("tp"), Gathered: Sharded("tp", dim=1)}


def build(**embedding):
    torch.manual_seed(0)
    model = Model(Plain(), **embedding).double()
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)
    return model


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Plan:
    """A model of Fairscale's layers, in its sharded data parallelism: each gradient is on one rank alone."""

    def __init__(self, unsharded, layout, of=Vocabulary, buffer=2**23, alone=False, **embedding):
        initialize.destroy_model_parallel()
        initialize.initialize_model_parallel(layout["tp"])
        torch.set_default_dtype(torch.float64)
        self.model, self.layout, self.of = Model(of(), **embedding), layout, of
        torch.set_default_dtype(torch.float32)
        shards(of).write(self.model, unsharded, layout)
        self.group = initialize.get_data_parallel_group()
        self.optimizer = OSS(self.model.parameters(), torch.optim.SGD, self.group, lr=0.01, momentum=0.9)
        self.parallel = self.model
        if layout["dp"] > 1 or alone:
            self.parallel = ShardedDataParallel(
                self.model, self.optimizer, self.group, reduce_buffer_size=buffer
            )

    def __call__(self, batch, microbatches):
        self.parallel.zero_grad()
        mine = [self.layout.slice(batch[name], "dp").chunk(microbatches) for name in ("tokens", "labels")]
        count, total = (batch["labels"] >= 0).sum() / self.layout["dp"], 0
        for place, (tokens, labels) in enumerate(zip(*mine, strict=True), 1):
            is_last = place == microbatches or self.parallel is self.model
            with nullcontext() if is_last else self.parallel.no_sync():
                part = self.sum_of(tokens, labels)
                (part / count).backward()
            total = total + part.detach()
        dist.all_reduce(total, group=self.group)
        self.model.gradients = {name: self.of_owner(each) for name, each in self.model.named_parameters()}
        return total / (batch["labels"] >= 0).sum()

    def sum_of(self, tokens, labels):
        logits, valid = self.parallel(tokens), labels >= 0
        if self.of is Gathered:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return (vocab_parallel_cross_entropy(logits, labels.clamp(min=0)) * valid).sum()

    def of_owner(self, parameter):
        """Return the gradient that the rank has whose optimizer takes it."""
        owner = self.optimizer._param_to_rank[parameter]
        found = [parameter.grad if dist.get_rank(self.group) == owner else None]
        dist.broadcast_object_list(found, group=self.group, group_src=owner)
        return found[0]

    def step(self):
        self.optimizer.step()


def shards(of):
    return ShardMap({"embed.weight": EMBEDDINGS[of], **SHARDS}, gradients=lambda model: model.gradients)


def check(layout, of=Vocabulary, plan=None, **embedding):
    assert_same_as_unsharded(
        layout,
        functools.partial(build, **embedding),
        functools.partial(Plan, of=of, **(plan or {}), **embedding),
        witness_batches(VOCAB),
        loss,
        shards=shards(of),
    )


@pytest.mark.parametrize("of", [Vocabulary, Gathered])
@pytest.mark.layouts(dp=(1, 2, 4), tp=(1, 2, 4), at_most=4)
def test_layers(layout, of):
    check(layout, of)


@pytest.mark.layouts(dp=(2, 4))
def test_without_buckets(layout):
    check(layout, plan={"buffer": 0})


# What is wrong, see shows_padding.py and shows_owner.py.
@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.layouts(tp=(2,))
def test_options_of_the_vocabulary_take_parts_for_the_whole(layout, options):
    with pytest.raises(AssertionError, match=r"gradient of `embed\.weight` differs"):
        check(layout, **options)


DROPPED = "is None, and that of the unsharded model is not"


@pytest.mark.layouts(tp=(2, 4))
def test_owner_alone_in_its_group_drops_its_gradients(layout):
    with pytest.raises(AssertionError, match=DROPPED):
        check(layout, plan={"alone": True})


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_owner_in_another_group_than_the_first_drops_its_gradients(layout):
    with pytest.raises(AssertionError, match=DROPPED):
        check(layout, plan={"buffer": 0})
