"""The eleven findings of NVIDIA/Megatron-LM#7452, held to the unsharded computation.

A test passes while Megatron-core has the bug and the report says what is quoted.
"""

import functools

import pytest
import torch
from layers import (
    ATTENTION_CUTS,
    CROSS_CUTS,
    GDN,
    GDN_CUTS,
    HEAD_CUTS,
    MOE,
    MTP_CUTS,
    RECOMPUTE,
    Attention,
    Crossed,
    CutHead,
    GatedDelta,
    InLlava,
    LegacyMtp,
    Mtp,
    Recomputed,
    Routed,
    RoutedInGpt,
    around,
    in_two_chunks,
    keep_two_chunks,
    of_mtp,
)
from megatron.core.ssm import gated_delta_net
from megatron.core.transformer.moe.moe_utils import get_tokens_per_expert_and_token_count
from one_layer import LENGTH, MLP_CUTS, VOCAB, Around, How, hold, says, term
from torch import nn

from lockstep.layouts import witness_batches

UNEXPLAINED = "differs; no single reduction, factor or part explains it"
BATCHES = witness_batches(VOCAB, sequences=12)
NEVER_PADDING_ALONE = [
    {**each, "labels": each["labels"].index_fill(1, torch.tensor([0]), 3)} for each in BATCHES
]
ALL_VALID = [{**each, "labels": each["tokens"].roll(-1, 1)} for each in BATCHES]


@pytest.mark.layouts(tp=(1, 2))
def test_1_labels_are_smoothed_over_a_ranks_own_vocabulary(layout):
    with says("first divergence: the output of the model", "loss is 3.6", UNEXPLAINED):
        hold(layout, functools.partial(CutHead, smoothing=0.1), HEAD_CUTS)


@pytest.mark.layouts(tp=(1, 2))
def test_2_a_vocabulary_parallel_loss_takes_gathered_logits(layout):
    with says("loss is the reference plus log 2: a log-sum-exp counts tp (2) wrongly"):
        hold(layout, functools.partial(CutHead, gather=True), HEAD_CUTS)


@pytest.mark.layouts(cp=(1, 2), dp=(1, 2))
def test_3_multi_token_prediction_does_not_divide_by_its_own_counts_yet(layout):
    batches = [of_mtp(each) for each in BATCHES]
    how = How(cut=in_two_chunks, keep=keep_two_chunks, terms={"mtp": term}, batches=batches)
    hold(layout, Mtp, MTP_CUTS, how, mtp_num_layers=1)


@pytest.mark.layouts(cp=(1, 2))
def test_3_but_does_so_over_cp_where_losses_are_means_of_microbatches(layout):
    batches = [of_mtp(each) for each in ALL_VALID]
    how = How(cut=in_two_chunks, keep=keep_two_chunks, terms={"mtp": term}, batches=batches)
    with says("has a wrong term `mtp` of the loss, which is a mean of the means of each sequence part"):
        hold(layout, LegacyMtp, MTP_CUTS, how, mtp_num_layers=1, calculate_per_token_loss=False)


WRONG_GROUPS = {
    "recompute": (around(Recomputed), MLP_CUTS, RECOMPUTE),
    "mask": (RoutedInGpt, None, {"sequence_parallel": True, **MOE}),
    "cross attention": (around(Crossed), CROSS_CUTS, {"sequence_parallel": True}),
    "llava": (InLlava, MLP_CUTS, {"sequence_parallel": True}),
}
"""Findings 4 to 7: they ask `parallel_state` for a group, though they are given another one."""


def hold_in_group(layout, what, global_tp):
    make, cuts, changes = WRONG_GROUPS[what]
    terms = {"aux": term} if what == "mask" else None
    hold(layout, make, cuts, How(global_tp, terms=terms, batches=NEVER_PADDING_ALONE), **changes)


@pytest.mark.parametrize(
    ("what", "divergence"),
    [
        ("recompute", "the output of `layer.up`"),
        ("mask", "the gradient of the output of `embed`; all outputs agree"),
        ("cross attention", "the output of `layer.attention.linear_kv`"),
        ("llava", "the output of `layer.up`"),  # the parts that it cuts are right ones, of other ranks
    ],
)
@pytest.mark.layouts(tp=(2,), dp=(2,))
def test_4_to_7_take_the_group_of_parallel_state(layout, what, divergence):
    with says(f"first divergence: {divergence}", UNEXPLAINED):
        hold_in_group(layout, what, "dp")


@pytest.mark.parametrize("what", WRONG_GROUPS)
@pytest.mark.layouts(tp=(2,), dp=(2,))
def test_4_to_7_hold_where_that_is_the_group_given(layout, what):
    hold_in_group(layout, what, "tp")


@pytest.mark.layouts(tp=(1, 2))
def test_8_the_norm_has_the_attention_sinks_of_one_rank(layout):
    offset = "`layer.attention.core_attention.softmax_offset`"
    with says(f"total norm counts of {offset} the part of tp 0 alone"):
        hold(layout, around(Attention), ATTENTION_CUTS, softmax_type="learnable")


@pytest.mark.layouts(cp=(1, 2))
def test_9_a_loss_is_divided_by_the_tokens_of_a_sequence_part(layout):
    how = How(cut=lambda layout, each: layout.slice(each, "cp", dim=1))
    with says("is a mean of the means of each sequence part", "loss is a mean of the means of each sequence"):
        hold(layout, Around, MLP_CUTS, how, calculate_per_token_loss=False)


@pytest.mark.layouts(tp=(1, 2))
def test_10_a_local_count_is_overwritten_by_that_of_all_ranks_and_right(layout):
    chosen = torch.ones(3, 4, dtype=torch.bool)
    _, local, total = get_tokens_per_expert_and_token_count(chosen, layout.group("tp"), 4, True)
    assert local == total == 6
    hold(layout, Routed, None, How(terms={"aux": term}), sequence_parallel=True, **MOE)


@pytest.mark.layouts(tp=(1, 2))
def test_10_without_a_mask_it_is_not_overwritten_and_wrong(layout):
    make = functools.partial(Routed, masked=False)
    with says("has the term `aux` of the loss as 1/2 of the reference: divided by tp (2) once too often"):
        hold(layout, make, None, How(terms={"aux": term}), sequence_parallel=True, **MOE)


@pytest.mark.layouts(tp=(1, 2))
def test_10_a_microbatch_of_padding_alone_is_nan(layout):
    batches = [{name: each.clone() for name, each in batch.items()} for batch in BATCHES]
    batches[1]["labels"][:4] = -100  # the first of three microbatches
    how = How(batches=batches, terms={"aux": term})
    with pytest.raises(ValueError, match="the reference's loss or gradient is not finite in step 1"):
        hold(layout, Routed, None, how, sequence_parallel=True, **MOE)
    with says("has the term `aux` of the loss as 1/2 of the reference"):  # without a mask it is finite
        hold(layout, functools.partial(Routed, masked=False), None, how, sequence_parallel=True, **MOE)


@pytest.mark.layouts(tp=(1, 2))
def test_11_the_norm_of_a_gated_delta_net_lacks_a_sum(layout, monkeypatch):
    monkeypatch.setattr(gated_delta_net, "HAVE_FLA", True)
    rule = functools.partial(gated_delta_net.torch_chunk_gated_delta_rule, chunk_size=LENGTH)
    monkeypatch.setattr(gated_delta_net, "torch_chunk_gated_delta_rule", rule)  # one chunk, not padded
    norm_of = nn.functional.normalize
    monkeypatch.setattr(gated_delta_net, "l2norm", lambda each: norm_of(each, dim=-1), raising=False)
    out_norm = "gradient of `layer.gdn.out_norm.weight`"
    with says(f"{out_norm} equals the reference after a sum over tp: that reduction is missing"):
        hold(layout, around(GatedDelta), GDN_CUTS, **GDN)
