"""Transformers of OLMo-core by its `parallelize_model`, over dp_replicate, dp_shard, cp (Ulysses) and tp."""

import functools

import pytest
import torch
import torch.distributed as dist
from in_float64 import InFloat64
from olmo_core.config import DType
from olmo_core.distributed import parallel
from olmo_core.distributed.utils import get_local_tensor
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
from olmo_core.train.train_module.transformer import (
    TransformerContextParallelConfig,
    TransformerDataParallelConfig,
    TransformerTensorParallelConfig,
    TransformerTrainModule,
)
from olmo_core.train.train_module.transformer.common import parallelize_model

from lockstep.layouts import NotOffered, ShardMap, assert_same_as_unsharded, witness_batches

VOCAB, WIDTH = 32, 16
DType.as_pt = lambda dtype: torch.float64  # it has none


def config(**options):
    return TransformerConfig.llama_like(
        d_model=WIDTH,
        vocab_size=VOCAB,
        n_layers=2,
        n_heads=4,
        feed_forward=FeedForwardConfig(hidden_size=24, bias=False),
        **options,
    )


KINDS = {
    "llama": config(),
    "groups of queries": config(n_kv_heads=2),
    "olmo2": config(block_name=TransformerBlockType.reordered_norm, qk_norm=True),
    "olmo3": config(block_name=TransformerBlockType.reordered_norm, qk_norm=True, use_head_qk_norm=True),
    "tied": config(tie_word_embeddings=True),
}


def build(kind):
    torch.manual_seed(0)
    with InFloat64():
        model = KINDS[kind].build(init_device="cpu")
        model.init_weights(device=torch.device("cpu"))
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return model


def loss(model, batch):
    with InFloat64():
        return model(batch["tokens"], labels=batch["labels"]).loss


class Plan:
    """`parallelize_model` fills the weights itself: those of the unsharded model are written after it."""

    def __init__(self, model, layout, kind):
        if kind == "groups of queries" and layout["cp"] * layout["tp"] > 2:
            raise NotOffered("Ulysses cuts the heads of keys that tp leaves: here one")
        self.layout = layout
        parallel._WORLD_MESH = None  # it takes one mesh a process
        dp, cp, tp = self.configs()
        mesh = parallel.build_world_mesh(dp=dp, cp=cp, tp=tp, device_type="cpu")
        with InFloat64():
            self.model = parallelize_model(
                KINDS[kind].build(init_device="cpu"),
                world_mesh=mesh,
                device=torch.device("cpu"),
                max_sequence_length=16,
                dp_config=dp,
                cp_config=cp,
                tp_config=tp,
            )
        ShardMap().write(self.model, model, layout)

    def configs(self):
        sizes = self.layout
        kind = "hsdp" if sizes["dp_replicate"] > 1 else "fsdp"
        dp = TransformerDataParallelConfig(name=kind)
        if kind == "hsdp":
            dp.num_replicas, dp.shard_degree = sizes["dp_replicate"], sizes["dp_shard"]
        cp = TransformerContextParallelConfig.ulysses(sizes["cp"]) if sizes["cp"] > 1 else None
        return dp, cp, TransformerTensorParallelConfig(degree=sizes["tp"]) if sizes["tp"] > 1 else None

    def __call__(self, batch, microbatches):
        rows = ("dp_replicate", "dp_shard")
        mine = [self.layout.slice(batch[name], rows).chunk(microbatches) for name in ("tokens", "labels")]
        # Its trainer divides by the tokens of a rank; here by those of all ranks, as FSDP2 takes the mean.
        valid = (batch["labels"] >= 0).sum() / self.layout.part(rows)[1]
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels in zip(*mine, strict=True):
            with InFloat64():
                found = self.model(tokens, labels=labels, loss_reduction="sum", loss_div_factor=valid)
                found.loss.backward()
            total += get_local_tensor(found.ce_loss)
        dist.all_reduce(total)
        return total / dist.get_world_size()

    def grad_norm(self):
        return TransformerTrainModule._clip_grad_norm(self, max_grad_norm=1e9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.layouts(dp_replicate=(1, 2), dp_shard=(1, 2), cp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout, kind):
    plan = functools.partial(Plan, kind=kind)
    assert_same_as_unsharded(layout, functools.partial(build, kind), plan, witness_batches(VOCAB), loss)
