"""Gradients of norms of heads, summed over tp once a microbatch: of two microbatches the first counts twice.

transformers 5.23.0, distributed/tensor_parallel.py, `ReplicatedWithGradAllReduce`: its hook reduces
`param.grad`, in which earlier microbatches are, already reduced.
Run: torchrun --nproc-per-node 2 shows_accumulation.py
"""

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.distributed import DistributedConfig

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)
NAME = "model.layers.0.self_attn.q_norm.weight"


def gradient(model, *microbatches):
    model.zero_grad()
    for tokens in microbatches:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return model.get_parameter(NAME).grad.clone()


dist.init_process_group("gloo")
torch.manual_seed(0)
whole = Qwen3ForCausalLM(CONFIG)
split = DistributedConfig(tp_size=2)
cut = Qwen3ForCausalLM.from_pretrained(
    None, config=CONFIG, state_dict=whole.state_dict(), distributed_config=split, dtype=torch.float32
)
first, second = torch.randint(32, (2, 3, 8))
if dist.get_rank() == 0:
    print("unsharded, two microbatches:", gradient(whole, first, second).tolist())
    print("where the first counts twice:", gradient(whole, first, first, second).tolist())
sharded = [gradient(cut, first), gradient(cut, first, second)]
if dist.get_rank() == 0:
    print("tp 2, one microbatch:", sharded[0].tolist(), "as unsharded:", gradient(whole, first).tolist())
    print("tp 2, two microbatches:", sharded[1].tolist())
dist.destroy_process_group()
