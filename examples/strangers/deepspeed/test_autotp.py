"""AutoTP of DeepSpeed, which takes the plans of transformers, over dp and tp, with ZeRO 0 and 1."""

import functools
import importlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, safe_get_full_grad
from in_float64 import InFloat64

from lockstep.layouts import Sharded, ShardMap, assert_same_as_unsharded, witness_batches

MICROBATCHES = 3
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
SHARDS = {f"*.{name}_proj.weight": Sharded("tp") for name in ("q", "k", "v", "gate", "up")}
SHARDS |= {f"*.{name}_proj.weight": Sharded("tp", dim=1) for name in ("o", "down")}
SHARDS["lm_head.weight"] = Sharded("tp")
# See test_zero.py.
get_accelerator().supported_dtypes = lambda: [torch.float64]
deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (torch.float64, torch.float64)
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


def build(kind):
    torch.manual_seed(0)
    with InFloat64():
        config = getattr(transformers, f"{kind}Config")(**SMALL, **HEADS)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).double().train()
    for each in model.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return model


def loss(model, batch):
    """The mean over all rows, valid or not, so that the means of ranks are the mean."""
    with InFloat64():
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / len(logits)


class Engine:
    def __init__(self, model, layout, stage):
        self.layout = layout
        config = {
            "train_micro_batch_size_per_gpu": 24 // layout["dp"] // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 0.0,
            "tensor_parallel": {"autotp_size": layout["tp"]},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with InFloat64():
            self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model = self.engine.module

    def __call__(self, batch, microbatches):
        mine = {name: self.layout.slice(each, "dp") for name, each in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for rows in zip(*(each.chunk(microbatches) for each in mine.values()), strict=True):
            with InFloat64():
                part = loss(self.engine, dict(zip(mine, rows, strict=True)))
                self.engine.backward(part)
                if self.engine.is_gradient_accumulation_boundary():
                    named = self.model.named_parameters()
                    self.model.whole = {name: safe_get_full_grad(each).clone() for name, each in named}
                else:
                    self.engine.step()
            total += part.detach() / microbatches
        group = groups.get_data_parallel_group()
        dist.all_reduce(total, group=group)
        return total / self.layout["dp"]

    def step(self):
        with InFloat64():
            self.engine.step()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.layouts(dp=(1, 2), tp=(2,), fresh=True)
def test_autotp(layout, kind, stage):
    assert_same_as_unsharded(
        layout,
        functools.partial(build, kind),
        functools.partial(Engine, stage=stage),
        witness_batches(32),
        loss,
        shards=ShardMap(SHARDS, gradients=lambda model: model.whole),
        microbatches=(MICROBATCHES,) * 3,
    )
