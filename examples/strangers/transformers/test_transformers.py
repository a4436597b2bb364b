"""Models of transformers, by the plans of their configurations, over dp, fsdp, tp, and experts over ranks."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from in_float64 import InFloat64
from transformers.distributed import DistributedConfig

from lockstep.layouts import assert_same_as_unsharded, witness_batches

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "experts_implementation": "eager",
}


class Plan:
    """What a test of `kind`, such as "Llama", gives to the assertion."""

    def __init__(self, kind, ep=()):
        self.kind, self.ep = kind, ep  # the axes over which experts are cut

    def build(self):
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**SMALL, **HEADS, **EXPERTS)
        with InFloat64():
            model = getattr(transformers, f"{self.kind}ForCausalLM")(config).double()
        for each in model.parameters():
            torch.nn.init.normal_(each, std=0.3)
        return model

    def load(self, model, layout):
        """Load the unsharded model's weights as from a checkpoint: each rank takes its part."""
        config = DistributedConfig(
            tp_size=layout["tp"],
            fsdp_size=layout["fsdp"],
            dp_replicate_size=layout["dp"],
            ep_size=layout.part(self.ep)[1],
        )
        with InFloat64():
            model = type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=model.state_dict(),
                distributed_config=config,
                dtype=torch.float64,
            )
        if config.ep_size > 1 and config.efsdp_size == 1:
            divide_once(model, config.dp_size)
        return model


def divide_once(model, factor):
    """FSDP2 of torch 2.13 divides twice, in float64, on a mesh of one rank: see shows_divided_twice.py."""
    for module in model.modules():
        if type(module).__name__.endswith("Experts") and factor > 1:
            module.set_gradient_divide_factor(factor**0.5)


def loss(model, batch):
    """The mean over all rows, valid or not, so that the means of ranks are the mean."""
    with InFloat64():
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / len(logits)


# With one microbatch a step where a norm is on parts of the heads: see shows_accumulation.py.
KINDS = {"Llama": (1, 3, 1), "Qwen3": (1, 1, 1), "Qwen3Moe": (1, 1, 1)}


def check(layout, plan, microbatches):
    assert_same_as_unsharded(
        layout, plan.build, plan.load, witness_batches(32), loss, microbatches=microbatches
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.layouts(dp=(1, 2), fsdp=(1, 2), tp=(1, 2), at_most=4)
def test_plan(layout, kind):
    check(layout, Plan(kind), KINDS[kind])


@pytest.mark.parametrize("ep", [("fsdp", "tp"), ("tp",)], ids="-".join)
@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral"])
@pytest.mark.layouts(dp=(1, 2), fsdp=(1, 2), tp=(1, 2), at_most=4)
def test_experts(layout, kind, ep):
    check(layout, Plan(kind, ep), KINDS["Qwen3Moe"])


@pytest.mark.xfail(strict=True, reason="gradients of norms of heads are summed over tp once a microbatch")
@pytest.mark.layouts(tp=(2,))
def test_accumulation_with_norms_of_heads(layout):
    check(layout, Plan("Qwen3"), (1, 3, 1))
