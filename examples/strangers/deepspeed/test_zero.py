"""DeepSpeed's engine with its stages of ZeRO over dp, in three microbatches a step."""

import functools
import importlib

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.utils import safe_get_full_grad
from in_float64 import InFloat64
from torch import nn

from lockstep.layouts import assert_same_as_unsharded, witness_batches

VOCAB, WIDTH, MICROBATCHES = 32, 16, 3
get_accelerator().supported_dtypes = lambda: [torch.float64]  # that of CPUs has float32 and less
# Of parameters, and of accumulated gradients: float32 whatever the model is.
deepspeed.DeepSpeedEngine.get_data_types = lambda engine: (torch.float64, torch.float64)
# Stage 3 refuses float64 in an assertion, and has no other use for this dtype.
Init._set_dtype = lambda init, *_: setattr(init, "dtype", torch.float32)
# It would compile a collective through shared memory, which is for inference.
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 27), nn.Linear(27, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def build():
    torch.manual_seed(0)
    model = Model().double()
    for each in model.parameters():
        nn.init.normal_(each, std=0.3)
    return model


def loss(model, batch):
    """The mean over all rows, valid or not, so that the means of ranks are the mean."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / len(logits)


class Engine:
    """DeepSpeed's engine of a model. What is compared is a copy of whole parameters and gradients."""

    def __init__(self, model, layout, zero, **config):
        self.layout, self.model = layout, build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with InFloat64():
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config={
                    "train_micro_batch_size_per_gpu": 24 // layout["dp"] // MICROBATCHES,
                    "gradient_accumulation_steps": MICROBATCHES,
                    "zero_optimization": zero,
                    "gradient_clipping": 0.0,
                    "zero_allow_untested_optimizer": True,
                    **config,
                },
            )
        self.show()

    def __call__(self, batch, microbatches):
        mine = {name: self.layout.slice(each, "dp") for name, each in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for rows in zip(*(each.chunk(microbatches) for each in mine.values()), strict=True):
            with InFloat64():
                part = loss(self.engine, dict(zip(mine, rows, strict=True)))
                self.engine.backward(part)
                if self.engine.is_gradient_accumulation_boundary():
                    for own, shown in self.pairs():
                        shown.grad = safe_get_full_grad(own).clone().view_as(shown)
                else:
                    self.engine.step()
            total += part.detach() / microbatches
        dist.all_reduce(total, group=self.layout.group("dp"))
        return total / self.layout["dp"]

    def pairs(self):
        return zip(self.engine.module.parameters(), self.model.parameters(), strict=True)

    def show(self):
        with torch.no_grad():
            for own, shown in self.pairs():
                with deepspeed.zero.GatheredParameters(own):
                    shown.copy_(own)

    def step(self):
        with InFloat64():
            self.engine.step()
        self.show()


ZERO = {f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)}


@pytest.mark.parametrize("zero", ZERO.values(), ids=ZERO)
@pytest.mark.layouts(dp=(2, 4), fresh=True)  # it keeps groups for ever
def test_zero(layout, zero):
    assert_same_as_unsharded(
        layout,
        build,
        functools.partial(Engine, zero=zero),
        witness_batches(VOCAB),
        loss,
        microbatches=(MICROBATCHES,) * 3,
    )
