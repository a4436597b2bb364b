"""A GPT of Megatron-core by its layers, its DDP and its schedule of pipelines, over pp, dp and tp."""

import re

import pytest
import torch
import torch.distributed as dist
from in_float64 import InFloat64
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from lockstep.layouts import Sharded, ShardMap, assert_same_as_unsharded, witness_batches

VOCAB, LAYERS, FFN, LENGTH = 32, 4, 24, 16


def name_of(own, layout):
    """Stages number their layers from 0; with tied embeddings the last one has a copy of the first one's."""
    first = layout.at("pp") * LAYERS // layout["pp"]
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) + first}", own)


SHARDS = ShardMap(
    {
        "*word_embeddings.weight": Sharded("tp"),
        "output_layer.weight": Sharded("tp"),
        "*linear_qkv.*": Sharded("tp"),
        "*linear_proj.weight": Sharded("tp", dim=1),
        "*linear_fc1.*": Sharded("tp", parts=(FFN, FFN)),  # of SwiGLU
        "*linear_fc2.weight": Sharded("tp", dim=1),
    },
    rename=name_of,
)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Megatron-core makes tensors on the current CUDA device, and scales gradients in the default dtype."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gpt(tp=1, pp=1, ep=1, experts=None, **more):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=False
    )
    # Its random states are those of CUDA; that of inference has none. There is no dropout here.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=FFN,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    with InFloat64({"cuda": "cpu"}):
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            VOCAB,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
        )


def build():
    model = gpt()
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return model


def sum_of_tokens(model, batch):
    tokens, labels = batch["tokens"], batch["labels"]
    positions = torch.arange(LENGTH).expand_as(tokens)
    late = torch.arange(LENGTH) > torch.arange(LENGTH)[:, None]
    output = model(tokens, positions, late[None, None], labels=labels.clamp(min=0))

    def loss(of_tokens):
        total = (of_tokens * (labels >= 0)).sum()
        return total, (labels >= 0).sum().int(), total.detach().clone()

    return output, loss


def loss(model, batch):
    with InFloat64({"cuda": "cpu"}):
        output, of_output = sum_of_tokens(model, batch)
        total, count, _ = of_output(output)
        return total / count


class Plan:
    def __init__(self, model, layout):
        self.layout, self.model = layout, gpt(layout["tp"], layout["pp"])
        SHARDS.write(self.model, model, layout)
        with InFloat64({"cuda": "cpu"}):
            config = DistributedDataParallelConfig(use_distributed_optimizer=False)
            self.ddp = DistributedDataParallel(self.model.config, config, self.model)

    def __call__(self, batch, microbatches):
        mine = {name: self.layout.slice(each, "dp").chunk(microbatches) for name, each in batch.items()}
        data = [dict(zip(mine, each, strict=True)) for each in zip(*mine.values(), strict=True)]
        self.ddp.zero_grad_buffer()
        with InFloat64({"cuda": "cpu"}):
            losses = get_forward_backward_func()(
                forward_step_func=lambda data, model: sum_of_tokens(model, next(data)),
                data_iterator=iter(data),
                model=[self.ddp],
                num_microbatches=microbatches,
                seq_length=LENGTH,
                micro_batch_size=len(data[0]["tokens"]),
            )
        for each in self.model.parameters():
            each.grad = each.main_grad.clone()
        if not parallel_state.is_pipeline_last_stage():
            return None
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total / (batch["labels"] >= 0).sum()


@pytest.mark.layouts(pp=(1, 2, 4), dp=(1, 2), tp=(1, 2), at_most=4)
def test_gpt(layout):
    assert_same_as_unsharded(layout, build, Plan, witness_batches(VOCAB), loss, shards=SHARDS)
