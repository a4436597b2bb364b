"""Small models around one layer or function of Megatron-core, trained by its DDP and its schedule.

Megatron-core is given the groups that ranks of a layout have; `parallel_state`, which some of its functions
ask all the same, has the tensor-parallel group that a test says.
"""

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from in_float64 import InFloat64
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    param_is_not_tensor_parallel_duplicate,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import nn

from lockstep.layouts import Sharded, ShardMap, assert_same_as_unsharded, keep_labels, witness_batches

VOCAB, LENGTH, HIDDEN, HEADS, FFN = 32, 16, 16, 4, 24
AXES = {
    **{name: (name,) for name in ("tp", "cp", "dp", "ep", "pp", "embd", "pos_embd")},
    "mp": ("tp",),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("dp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "expt_dp": ("dp", "cp", "tp"),
}
"""The axes of a layout that each group of Megatron-core spans; those of stages are of one rank here."""


def on_cpu():
    return InFloat64({"cuda": "cpu"})


def config_of(tp, cp, **changes):
    given = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": FFN,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.float64,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "calculate_per_token_loss": True,
        **changes,
    }
    if tp == 1:
        given["sequence_parallel"] = False
    sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
    return TransformerConfig(**given, **sizes, finalize_model_grads_func=finalize_model_grads)


def column(size, of_output, config, groups, **given):
    given |= {"init_method": nn.init.ones_, "bias": False, "tp_group": groups.tp}
    return ColumnParallelLinear(size, of_output, config=config, **given)


MLP_CUTS = {"*up.weight": Sharded("tp"), "*down.weight": Sharded("tp", dim=1)}


class Mlp(nn.Module):
    """Cut over tp, by Megatron-core's linear layers."""

    def __init__(self, config, groups):
        super().__init__()
        self.config = config
        self.up = column(HIDDEN, FFN, config, groups)
        given = {"init_method": nn.init.ones_, "bias": False, "tp_group": groups.tp}
        self.down = RowParallelLinear(
            FFN, HIDDEN, config=config, input_is_parallel=True, skip_bias_add=True, **given
        )

    def forward(self, hidden):
        return self.down(torch.tanh(self.up(hidden)[0]))[0]


class Around(MegatronModule):
    """Embedding, a layer and a head; gives the losses of tokens, (rows, sequence).

    Hidden states have the shape (sequence, rows, hidden); with sequence parallelism the layer has a part.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config, groups, layer=Mlp):
        super().__init__(config)
        self.groups = groups
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layer = layer(config, groups)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens, labels):
        return self.of_tokens(self.layer(self.cut(self.embed(tokens.T))), labels)

    def of_tokens(self, hidden, labels):
        logits = self.head(self.joined(hidden)).permute(1, 2, 0)
        return nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")

    def cut(self, hidden):
        is_cut, group = self.config.sequence_parallel, self.groups.tp
        return scatter_to_sequence_parallel_region(hidden, group) if is_cut else hidden

    def joined(self, hidden):
        is_cut, group = self.config.sequence_parallel, self.groups.tp
        return gather_from_sequence_parallel_region(hidden, False, group) if is_cut else hidden

    def add(self, of_tokens, labels):
        """Return what a loss function gives to a schedule, and of it what is shown."""
        total, count = (of_tokens * (labels >= 0)).sum(), (labels >= 0).sum()
        shown = total if self.config.calculate_per_token_loss else total / count.clamp(min=1)
        return total, count.int(), shown.detach().clone()

    def set_input_tensor(self, given):
        """Take what an earlier stage gives: there is none."""


@contextmanager
def attached():
    """Collect the auxiliary losses that Megatron-core attaches to a tensor, each with a gradient of 1."""
    terms = []

    def attach(output, term):
        terms.append(term)
        return output

    moe = mock.patch.object(MoEAuxLossAutoScaler, "apply", attach)
    with moe, mock.patch.object(MTPLossAutoScaler, "apply", attach):
        yield terms


def losses(model, batch, parts):
    """The loss by the microbatches of all ranks, and what is attached, both as gradients count them."""
    total = terms = 0.0
    per_token = model.config.calculate_per_token_loss
    for part in parts:
        with on_cpu(), attached() as found:
            valid = part["labels"] >= 0
            own = (model(**part) * valid).sum()
        total = total + (own if per_token else own / valid.sum().clamp(min=1))
        terms = terms + sum(each.sum() for each in found)
    count = (batch["labels"] >= 0).sum() if per_token else len(parts)
    return total / count, terms / count


def loss(model, batch, parts):
    """Its value is without what is attached, its gradient is with it."""
    total, terms = losses(model, batch, parts)
    return total + terms - float(terms)


def term(model, batch, parts):
    return losses(model, batch, parts)[1]


class Plan:
    def __init__(self, model, layout, make, rules, how):
        self.layout, self.how = layout, how
        self.model = make(layout)
        rules.write(self.model, model, layout)
        with on_cpu():
            ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=False)
            self.ddp = DistributedDataParallel(
                self.model.config, ddp_config, self.model, pg_collection=self.model.groups
            )

    def __call__(self, batch, microbatches):
        mine = {name: self.how.cut(self.layout, each) for name, each in batch.items()}
        rows = {name: self.layout.slice(each, "dp").chunk(microbatches) for name, each in mine.items()}
        data = [dict(zip(rows, each, strict=True)) for each in zip(*rows.values(), strict=True)]
        self.ddp.zero_grad_buffer()
        with on_cpu():
            shown = forward_backward_no_pipelining(
                forward_step_func=self.forward_step,
                data_iterator=iter(data),
                model=[self.ddp],
                num_microbatches=microbatches,
                seq_length=LENGTH,
                micro_batch_size=len(data[0]["tokens"]),
                pg_collection=self.model.groups,
            )
        for each in self.model.parameters():
            each.grad = each.main_grad.clone()
        total, group = torch.stack(shown).sum(), self.model.groups.dp_cp
        dist.all_reduce(total, group=group)
        per_token = self.model.config.calculate_per_token_loss
        return total / ((batch["labels"] >= 0).sum() if per_token else microbatches * group.size())

    def forward_step(self, data, ddp):
        batch = next(data)
        return ddp(**batch), lambda of_tokens: self.model.add(of_tokens, batch["labels"])

    def grad_norm(self):
        group = self.model.groups.tp
        own = [
            each.grad
            for each in self.model.parameters()
            if param_is_not_tensor_parallel_duplicate(each, group)
        ]
        with on_cpu():
            return get_grad_norm_fp32(own, grad_stats_parallel_group=self.model.groups.mp)


def groups_of(layout, alone):
    """The groups of a layout by Megatron-core's names; without a layout those of one rank."""

    def group(axes):
        large = [axis for axis in axes if layout is not None and layout.sizes.get(axis, 1) > 1]
        return layout.group(*large) if large else alone

    return ProcessGroupCollection(**{name: group(axes) for name, axes in AXES.items()})


@dataclass(frozen=True)
class How:
    """How a module is held.

    Attributes:
        global_tp: the axis along which `parallel_state` has its tensor-parallel group.
        cut: takes this rank's part of a tensor of the batch, but for its rows.
        keep: keeps such a part of a batch.
        terms: auxiliary terms of the loss.
        batches: of the steps.
    """

    global_tp: str = "tp"
    cut: Any = lambda layout, each: each
    keep: Any = keep_labels
    terms: Any = None
    batches: Any = None


def hold(layout, make, cuts=None, how=None, **changes):
    """Hold a module that is made from a config, with changes, and groups to the unsharded one."""
    how = how or How()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    parallel_state._GLOBAL_MEMORY_BUFFER or parallel_state._set_global_memory_buffer()
    parallel_state._DATA_PARALLEL_GROUP = parallel_state._DATA_PARALLEL_GROUP_WITH_CP = alone

    def model_on(layout):
        groups = groups_of(layout, alone)
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = getattr(groups, how.global_tp)
        tp, cp = (1, 1) if layout is None else (layout["tp"], layout["cp"])
        with on_cpu():
            model = make(config_of(tp, cp, **changes), groups)
        torch.manual_seed(0)
        for each in model.parameters():
            nn.init.normal_(each, std=0.3)
        return model

    rules = ShardMap(cuts or {})
    assert_same_as_unsharded(
        layout,
        lambda: model_on(None),
        lambda model, layout: Plan(model, layout, model_on, rules, how),
        how.batches or witness_batches(VOCAB, sequences=12),
        loss,
        shards=rules,
        parts=how.keep,
        terms=how.terms,
    )


def says(*sentences):
    """The bug is there and the report has these sentences: red when it is mended, or named otherwise."""
    return pytest.raises(AssertionError, match="".join(f"(?s:.*){re.escape(each)}" for each in sentences))
