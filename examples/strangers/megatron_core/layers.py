"""The layers and functions of Megatron-core that NVIDIA/Megatron-LM#7452 is about, each in a small model."""

import functools

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer.attention import (
    CrossAttention,
    CrossAttentionSubmodules,
    SelfAttention,
    SelfAttentionSubmodules,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_batch_on_this_cp_rank
from one_layer import HIDDEN, LENGTH, MLP_CUTS, VOCAB, Around, Mlp, column
from torch import distributed as dist
from torch import nn

from lockstep.layouts import Sharded, keep_labels

EXPERTS = 4
MOE = {"num_moe_experts": EXPERTS, "moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "aux_loss"}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": True,
}
GDN = {
    "deterministic_mode": True,
    "activation_func": nn.functional.silu,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}

HEAD_CUTS = {**MLP_CUTS, "head.weight": Sharded("tp")}
MTP_CUTS = {**MLP_CUTS, "output_layer.weight": Sharded("tp")}
ATTENTION_CUTS = {
    "*linear_qkv.weight": Sharded("tp"),
    "*linear_proj.weight": Sharded("tp", dim=1),
    "*softmax_offset": Sharded("tp"),
}
CROSS_CUTS = {
    "*linear_q.weight": Sharded("tp"),
    "*linear_kv.weight": Sharded("tp"),
    "*linear_proj.weight": Sharded("tp", dim=1),
}
GDN_CUTS = {
    "*in_proj.weight": Sharded("tp", parts=(8, 8, 16, 16, 2, 2)),
    "*conv1d.weight": Sharded("tp", parts=(8, 8, 16)),
    "*dt_bias": Sharded("tp"),
    "*A_log": Sharded("tp"),
    "*out_proj.weight": Sharded("tp", dim=1),
}


class CutHead(Around):
    """A head that is cut over tp, with the vocabulary-parallel loss; it may gather the logits before."""

    def __init__(self, config, groups, gather=False, smoothing=0.0):
        super().__init__(config, groups)
        self.head, self.smoothing = column(HIDDEN, VOCAB, config, groups, gather_output=gather), smoothing

    def forward(self, tokens, labels):
        logits = self.head(self.layer(self.embed(tokens)))[0].clone()
        return vocab_parallel_cross_entropy(logits, labels.clamp(min=0), self.smoothing)


class Mtp(Around):
    """What a GPT does behind its decoder; the layer is that of multi-token prediction."""

    _postprocess = GPTModel._postprocess
    compute_language_model_loss = LanguageModule.compute_language_model_loss
    share_embeddings_and_output_weights, post_process = False, True

    def __init__(self, config, groups):
        super().__init__(config, groups)
        self.output_layer, self.head, self.cp_group = column(HIDDEN, VOCAB, config, groups), None, groups.cp

    def forward(self, tokens, labels, targets, counted):
        hidden = self.embed(tokens.T)
        none = dict.fromkeys(["input_ids", "position_ids", "rotary_pos_emb", "rotary_pos_cos"])
        return self._postprocess(
            torch.cat([hidden, self.layer(hidden)]),
            labels=targets,
            loss_mask=counted,
            rotary_pos_sin=None,
            **none,
        )


class LegacyMtp(Mtp):
    """With a loss function of two values, which divides by the tokens of all context-parallel ranks."""

    def add(self, of_tokens, labels):
        dist.all_reduce(count := (labels >= 0).sum(), group=self.cp_group)
        mean = (of_tokens * (labels >= 0)).sum() / count
        return mean, (mean * self.cp_group.size()).detach().clone()


def of_mtp(batch):
    """Return a batch with targets and weights that keep what is behind a part, too."""
    labels = batch["labels"]
    return {**batch, "targets": labels.clamp(min=0), "counted": (labels >= 0).double()}


def in_two_chunks(layout, each):
    return get_batch_on_this_cp_rank({"": each}, layout.group("cp"))[""] if layout["cp"] > 1 else each


def keep_two_chunks(batch, index, count):
    """Keep a rank's two chunks: `counted` is one place later, as it will be shifted."""
    kept = [keep_labels(batch, each, 2 * count)["labels"] for each in (index, 2 * count - 1 - index)]
    labels = torch.maximum(*kept)
    later = (labels >= 0).roll(1, 1) & (batch["counted"] > 0)
    return {**batch, "labels": labels, "counted": later.double()}


class Recomputed(Mlp):
    """By the layer of multi-token prediction, as its checkpoints are."""

    _checkpointed_forward = MultiTokenPredictionLayer._checkpointed_forward

    def forward(self, hidden):
        return self._checkpointed_forward(super().forward, hidden + 0)


class Routed(Around):
    """A router of experts, each of which adds its vector to a token; it may know what is padding."""

    def __init__(self, config, groups, masked=True):
        super().__init__(config, groups, TopKRouter)
        self.layer.set_layer_number(1)
        self.vectors, self.masked = nn.Linear(EXPERTS, HIDDEN, bias=False), masked
        self.vectors.weight.sequence_parallel = True

    def forward(self, tokens, labels):
        mask = self.cut((labels < 0).T.contiguous()) if self.masked else None
        return self.routed(self.cut(self.embed(tokens.T)), mask, labels)

    def routed(self, hidden, mask, labels):
        probs, _ = self.layer(hidden, mask)
        return self.of_tokens(hidden + self.vectors(probs.view(*hidden.shape[:2], -1)), labels)


class RoutedInGpt(Routed):
    """What a GPT does before its decoder, which cuts hidden states and the mask of padding."""

    _preprocess = GPTModel._preprocess
    pre_process, position_embedding_type, mtp_process = True, "none", False

    def embedding(self, input_ids, position_ids):
        return self.cut(self.embed(input_ids.T))

    def forward(self, tokens, labels):
        hidden, *_, mask = self._preprocess(tokens, None, padding_mask=labels < 0)
        return self.routed(hidden, mask.T, labels)


class Crossed(nn.Module):
    def __init__(self, config, groups):
        super().__init__()
        linear = ColumnParallelLinear, ColumnParallelLinear
        parts = CrossAttentionSubmodules(*linear, DotProductAttention, RowParallelLinear)
        self.attention = CrossAttention(config, parts, 1, pg_collection=groups)

    def forward(self, hidden):
        return self.attention(hidden, None, key_value_states=hidden)[0]


class InLlava(Around):
    """LLaVA cuts hidden states for the language model."""

    _process_embedding_token_parallel = LLaVAModel._process_embedding_token_parallel
    pre_process, post_process, context_parallel_lm, tp_comm_overlap_lm = True, False, 1, False
    tensor_model_parallel_size_lm, sequence_parallel_lm = 2, True

    def cut(self, hidden):
        is_cut = self.config.sequence_parallel
        return self._process_embedding_token_parallel(hidden, None, None, None)[0] if is_cut else hidden


class Attention(nn.Module):
    def __init__(self, config, groups):
        super().__init__()
        parts = SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear)
        self.attention = SelfAttention(config, parts, 1, AttnMaskType.causal, pg_collection=groups)

    def forward(self, hidden):
        late = torch.ones(LENGTH, LENGTH).triu(1).bool()
        return self.attention(hidden, late[None, None])[0]


class GatedDelta(nn.Module):
    def __init__(self, config, groups):
        super().__init__()
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        self.gdn = GatedDeltaNet(config, parts, 1, pg_collection=groups)

    def forward(self, hidden):
        return self.gdn(hidden, None)[0]


def around(layer):
    return functools.partial(Around, layer=layer)
