"""A GPT of Megatron-core by its layers, its DDP and its pipeline schedule, over pp, dp, ep and tp.

Only norms of Transformer Engine and Apex, which want CUDA, take part in sequence parallelism: there is none
here, and no experts with tp, which want it. Dispatch of tokens by all-to-all wants streams of CUDA.
"""

import functools
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
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import param_is_not_shared

from lockstep.layouts import Sharded, ShardMap, assert_same_as_unsharded, witness_batches

VOCAB, LAYERS, FFN, LENGTH, EXPERTS = 32, 4, 24, 16, 4
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": FFN,
}
SWIGLU = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "normalization": "RMSNorm"}
NO_KERNELS = dict.fromkeys(
    [
        "gradient_accumulation_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
    ],
    False,
)
MOE = {"num_moe_experts": EXPERTS, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
TAKES_CPU = functools.partial(InFloat64, {"cuda": "cpu"})


def gpt(kind, tp=1, pp=1, ep=1):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=False
    )
    # Its random states are those of CUDA; that of inference has none. There is no dropout here.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        **SIZES,
        **SWIGLU,
        **NO_KERNELS,
        **(MOE if kind == "experts" else {}),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
    )
    with TAKES_CPU():
        return GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm", num_experts=config.num_moe_experts),
            VOCAB,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=kind == "tied",
            position_embedding_type="rope",
        )


def build(kind):
    model = gpt(kind)
    torch.manual_seed(0)
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return model


def sum_of_tokens(model, batch):
    """What a forward step gives to a schedule: losses of tokens, and how they are added."""
    tokens, labels = batch["tokens"], batch["labels"]
    positions = torch.arange(LENGTH).expand_as(tokens)
    late = torch.arange(LENGTH) > torch.arange(LENGTH)[:, None]
    output = model(tokens, positions, late[None, None], labels=labels.clamp(min=0))

    def loss(of_tokens):
        total = (of_tokens * (labels >= 0)).sum()
        return total, (labels >= 0).sum().int(), total.detach().clone()

    return output, loss


def loss(model, batch):
    with TAKES_CPU():
        output, of_output = sum_of_tokens(model, batch)
        total, count, _ = of_output(output)
        return total / count


def name_of(own, layout, kind):
    """Stages number layers from 0, as ranks do experts; the last stage has a copy of tied embeddings."""
    first = {"layers": LAYERS * layout.at("pp") // layout["pp"]}
    first["local_experts"] = EXPERTS * layout.at("ep") // layout["ep"]
    own = re.sub(
        r"(layers|local_experts)\.(\d+)", lambda found: f"{found[1]}.{int(found[2]) + first[found[1]]}", own
    )
    return "embedding.word_embeddings.weight" if kind == "tied" and own == "output_layer.weight" else own


def shards(kind):
    rules = {
        "*word_embeddings.weight": Sharded("tp"),
        "*linear_qkv.*": Sharded("tp"),
        "*linear_proj.weight": Sharded("tp", dim=1),
        "*linear_fc1.*": Sharded("tp", parts=(FFN, FFN)),
        "*linear_fc2.weight": Sharded("tp", dim=1),
    }
    if kind != "tied":
        rules["output_layer.weight"] = Sharded("tp")
    return ShardMap(rules, rename=functools.partial(name_of, kind=kind))


class Plan:
    def __init__(self, model, layout, kind):
        self.layout, self.model = layout, gpt(kind, layout["tp"], layout["pp"], layout["ep"])
        shards(kind).write(self.model, model, layout)
        with TAKES_CPU():
            config = DistributedDataParallelConfig(use_distributed_optimizer=False)
            self.ddp = DistributedDataParallel(self.model.config, config, self.model)
        if kind != "experts":  # norms of experts are its optimizer's matter
            self.grad_norm = self.norm_of_dense

    def __call__(self, batch, microbatches):
        names = list(batch)
        parts = (self.layout.slice(batch[name], ("dp", "ep")).chunk(microbatches) for name in names)
        data = [dict(zip(names, each, strict=True)) for each in zip(*parts, strict=True)]
        self.ddp.zero_grad_buffer()
        with TAKES_CPU():
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

    def norm_of_dense(self):
        is_one = tensor_parallel.param_is_not_tensor_parallel_duplicate
        own = [each.grad for each in self.model.parameters() if param_is_not_shared(each) and is_one(each)]
        with TAKES_CPU():
            return get_grad_norm_fp32(
                own, grad_stats_parallel_group=parallel_state.get_model_parallel_group()
            )


def check(layout, kind):
    plan = functools.partial(Plan, kind=kind)
    assert_same_as_unsharded(layout, BUILDS[kind], plan, witness_batches(VOCAB), loss, shards=shards(kind))


BUILDS = {kind: functools.partial(build, kind) for kind in ("dense", "tied", "experts")}


@pytest.mark.parametrize("kind", ["dense", "tied"])
@pytest.mark.layouts(pp=(1, 2, 4), dp=(1, 2), tp=(1, 2), at_most=4)
def test_gpt(layout, kind):
    check(layout, kind)


@pytest.mark.layouts(pp=(1, 2), dp=(1, 2), ep=(1, 2, 4), at_most=4)
def test_experts(layout):
    check(layout, "experts")
