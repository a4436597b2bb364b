"""The tensor-parallel plans of all language models of transformers that a tiny configuration builds."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from in_float64 import InFloat64
from transformers.distributed import DistributedConfig

from lockstep.layouts import assert_same_as_unsharded, witness_batches

# Each reads of these what it has.
TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"]),
    **dict.fromkeys(["hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop"], 0.0),
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"], 1),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
# Those that build and hold; the name of the model, where it is another one than that of the configuration.
SAME = [
    "Afmoe",
    "Arcee",
    "Beam",
    "Cohere",
    "Cohere2",
    "Cohere2Moe",
    "Dots1",
    "Ernie4_5",
    "Ernie4_5_Moe",
    "Exaone4",
    "ExaoneMoe",
    "FlexOlmo",
    "Flint",
    "Gemma",
    "Gemma2",
    "GPTNeoX",
    "Glm",
    "Glm4",
    "Glm4Moe",
    "GptOss",
    "Granite",
    "GraniteSWA",
    "GraniteMoe",
    "GraniteMoeSWA",
    "GraniteMoeShared",
    "HYV3",
    "Helium",
    "HrmText",
    "HunYuanMoEV1",
    "HyperCLOVAX",
    "Jais2",
    "Jamba",
    "Kolibri1",
    "Laguna",
    "Llama",
    "Mellum",
    "MiMoV2Flash",
    "MiniMax",
    "MiniMaxM2",
    "Ministral",
    "Ministral3",
    "Mistral",
    "Mixtral",
    "NanoChat",
    "Nemotron",
    "Olmo",
    "Olmo2",
    "Olmo3",
    "OlmoHybrid",
    "Olmoe",
    "Phi",
    "Phi3",
    "Phimoe",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "Qwen3Moe",
    "SeedOss",
    "SmolLM3",
    "SolarOpen",
    "Starcoder2",
    "VaultGemma",
    "Cwm",
]
MODELS = {
    **{name: name for name in SAME},
    **{f"{name}Text": name for name in ("Gemma3", "MiniMaxM3VL", "Qwen4Exp")},
    "Gemma4UnifiedText": "Gemma4Unified",
    "AriaText": "AriaText",
    "InternLM3": "Llama",
    "IQuestCoder": "Llama",
    "Qwen3Next": "Qwen3Next",
    **{name: name for name in ("AXK1", "AXK2", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite")},
    **{name: name for name in ("GlmMoeDsa", "MiniCPM3", "Youtu")},
    "Dots3NoteText": "Dots3Note",
    "Qwen3_5MoeText": "Qwen3_5Moe",
}


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
}
# Attention of the delta rule amplifies rounding, so that its weights are small.
OPTIONS = {
    "Cwm": {"bos_token_id": 1, "eos_token_id": 2},
    "Qwen3Next": {"std": 0.1},
    "Qwen3_5MoeText": {"std": 0.1},
    **dict.fromkeys(("AXK1", "AXK2", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite"), LATENT),
    **dict.fromkeys(("GlmMoeDsa", "MiniCPM3", "Youtu", "Dots3NoteText"), LATENT),
}


class Family:
    """What a test of a configuration gives to the assertion."""

    def __init__(self, kind, model=None, std=0.3, **options):
        self.kind, self.std, self.options = kind, std, options
        self.model = model or f"{MODELS[kind]}ForCausalLM"

    def build(self):
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**{**TINY, **self.options})
        with InFloat64():
            model = getattr(transformers, self.model)(config).double().eval()
        for each in model.parameters():
            torch.nn.init.normal_(each, std=self.std)
        loss(model, witness_batches(32)[0]).backward()
        for each in model.parameters():  # biases by which experts are chosen are not trained
            each.requires_grad_(each.grad is not None)
            each.grad = None
        return model

    def load(self, model, layout):
        """Load the unsharded model's weights as from a checkpoint: each rank takes its part."""
        with InFloat64():
            return type(model).from_pretrained(
                None,
                config=model.config,
                state_dict=model.state_dict(),
                distributed_config=DistributedConfig(tp_size=layout["tp"], fsdp_size=layout["fsdp"]),
                dtype=torch.float64,
            )

    def hold(self, layout):
        # With one microbatch a step: see shows_accumulation.py.
        batches = witness_batches(32)
        assert_same_as_unsharded(layout, self.build, self.load, batches, loss, microbatches=(1, 1, 1))


def loss(model, batch):
    """The mean over all rows, valid or not, so that the means of ranks are the mean."""
    with InFloat64():
        found = model(input_ids=batch["tokens"], use_cache=False)
    logits = found[0]  # or the last hidden states
    labels = batch["labels"].where(batch["labels"] < 0, batch["labels"] % logits.shape[-1])
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / len(logits)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.layouts(tp=(2,))
def test_plan(layout, kind):
    Family(kind, **OPTIONS.get(kind, {})).hold(layout)


VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "padding": {"pad_token_id": 20},
    "odd vocabulary": {"vocab_size": 33},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.layouts(fsdp=(1, 2), tp=(2,))
def test_variants_of_llama(layout, options):
    Family("Llama", **options).hold(layout)


# What is wrong, see shows_partial.py.
PARTIAL = {
    "Glm4Moe": {"use_qk_norm": True},
    "Phi": {"qk_layernorm": True},
    "Apertus": {"model": "ApertusForCausalLM"},
    "Qwen3VLMoeText": {"model": "Qwen3VLMoeTextModel"},
    "Qwen3OmniMoeText": {"model": "Qwen3OmniMoeThinkerTextModel"},
}


@pytest.mark.parametrize("kind", PARTIAL)
@pytest.mark.layouts(tp=(2,))
def test_gradients_of_what_is_whole_are_of_a_part(layout, kind):
    with pytest.raises(AssertionError, match="equals the reference after a sum over tp: that reduction is"):
        Family(kind, **PARTIAL[kind]).hold(layout)
