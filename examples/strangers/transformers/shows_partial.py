"""Tensor parallelism of models that norm their heads, or learn their activation: gradients of a part.

transformers 5.23.0: `base_model_tp_plan` in models/{glm4_moe,phi,apertus,qwen3_vl_moe}/configuration_*.py,
and in qwen3_omni_moe's, names no `replicated_with_grad_allreduce` for parameters that are whole on each rank
and work on its part of the heads, or of the activation: their gradients are never summed over the ranks.
Run: torchrun --nproc-per-node 2 shows_partial.py
"""

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "eos_token_id": None}
EXPERTS = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CASES = {
    "Glm4Moe": ({"use_qk_norm": True, **EXPERTS}, "self_attn.q_norm.weight"),
    "Phi": ({"qk_layernorm": True}, "self_attn.q_layernorm.weight"),
    "Apertus": ({}, "mlp.act_fn.alpha_p"),
    "Qwen3VLMoeText": (EXPERTS, "layers.0.self_attn.q_norm.weight"),
    "Qwen3OmniMoeText": (EXPERTS, "layers.0.self_attn.q_norm.weight"),
}

dist.init_process_group("gloo")
for kind, (options, name) in CASES.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **HEADS, **options)
    name = name if kind.endswith("Text") else f"model.layers.0.{name}"
    model = kind.replace("OmniMoe", "OmniMoeThinker") + ("Model" if kind.endswith("Text") else "ForCausalLM")
    whole = getattr(transformers, model)(config)
    split = type(whole).from_pretrained(
        None,
        config=config,
        state_dict=whole.state_dict(),
        distributed_config=DistributedConfig(tp_size=2),
        dtype=torch.float32,
    )
    tokens = torch.randint(32, (3, 8))
    gradients = []
    for model in (whole, split):
        found = model(input_ids=tokens, use_cache=False)
        found[0].square().mean().backward()  # logits, or the last hidden states
        gradients.append(model.get_parameter(name).grad)
    of_ranks = [torch.empty_like(gradients[1]) for _ in range(2)]
    dist.all_gather(of_ranks, gradients[1])
    if dist.get_rank() == 0:
        print(kind, name, "unsharded", gradients[0].tolist(), "and their sum", sum(of_ranks).tolist())
        for rank, gradient in enumerate(of_ranks):
            print(f"  of rank {rank} with tp 2", gradient.tolist())
dist.destroy_process_group()
