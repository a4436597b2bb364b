"""Llama 3 of torchtitan by its `parallelize_llama`, over dp_replicate, dp_shard and tp.

DTensors are along tp alone, or along all axes. The third way, `spmd_types`, gives FSDP2 plain parameters on a
mesh that names its axes of data, which torch 2.13 refuses.
"""

import pytest
import torch
import torch.distributed as dist
from in_float64 import InFloat64
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, full_dtensor, parallel_dims, utils
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from lockstep.layouts import assert_same_as_unsharded, witness_batches

VOCAB, WIDTH, HEADS = 32, 16, 4
TORCH_DTYPE_MAP["float64"] = torch.float64  # else FSDP would cast parameters to float32
parallel_dims.device_type = "cpu"  # where there is no accelerator it says "cuda"


class Plan:
    def __init__(self, model, layout, backend):
        axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        sizes = {axis: layout[axis] for axis in axes}
        utils.set_spmd_backend(backend)
        self.layout, self.backend = layout, backend
        self.dims = ParallelDims(**sizes, world_size=dist.get_world_size(), spmd_backend=backend)
        self.dims.build_mesh()
        self.loss = CrossEntropyLoss(CrossEntropyLoss.Config())
        self.model = llama3.parallelize_llama(
            model,
            parallel_dims=self.dims,
            training=TrainingConfig(mixed_precision_param="float64", mixed_precision_reduce="float64"),
            parallelism=ParallelismConfig(spmd_backend=backend),
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )

    def __call__(self, batch, microbatches):
        rows = ("dp_replicate", "dp_shard")
        mine = [self.layout.slice(batch[name], rows).chunk(microbatches) for name in ("tokens", "labels")]
        valid, total = (batch["labels"] >= 0).sum(), torch.zeros((), dtype=torch.float64)
        for tokens, labels in zip(*mine, strict=True):
            if self.backend == "full_dtensor":
                tokens, labels, _ = full_dtensor.parallelize_inputs(self.dims, tokens, labels, {})
            with InFloat64():
                part, _ = self.loss(self.model(tokens), labels, valid)
            part.backward()
            total += part.to_local().detach() if self.backend == "full_dtensor" else part.detach()
        if self.dims.dp_enabled:
            dist.all_reduce(total, group=self.dims.get_mesh("loss").get_group())
        return total

    def grad_norm(self):
        return utils.clip_grad_norm_(self.model.parameters(), max_norm=1e9)


def build():
    torch.manual_seed(0)
    utils.set_spmd_backend("partial_dtensor")
    with InFloat64():
        config = llama3.Llama3Model.Config(
            dim=WIDTH,
            vocab_size=VOCAB,
            tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=WIDTH),
            norm=RMSNorm.Config(normalized_shape=WIDTH),
            lm_head=Linear.Config(in_features=WIDTH, out_features=VOCAB),
            layers=llama3._build_llama3_layers(
                n_layers=2,
                dim=WIDTH,
                n_heads=HEADS,
                n_kv_heads=HEADS // 2,
                hidden_dim=24,
                rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=16),
                attn_backend="flex",
            ),
        )
        for layer in config.layers:  # flex attention is not for training on CPU
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        set_llama3_sharding_config(config, enable_sp=True)
        model = config.build()
    for each in model.parameters():  # not model.double(), which makes the cache of RoPE real
        each.data = torch.randn(each.shape, dtype=torch.float64) * 0.3
    return model


def loss(model, batch):
    with InFloat64():
        logits = model(batch["tokens"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@pytest.mark.layouts(dp_replicate=(1, 2), dp_shard=(1, 2), tp=(1, 2), at_most=4)
def test_llama(layout, backend):
    def parallelize(model, layout):
        return Plan(model, layout, backend)

    assert_same_as_unsharded(layout, build, parallelize, witness_batches(VOCAB), loss)
