"""The models: sizes of their units, gradients, delays."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from lockstep.conformance import ShardSpec
from lockstep.conformance.models import (
    AlwaysWrapNestedWrappedModule,
    InHalf,
    MixtureOfExperts,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
    copier,
)
from lockstep.conformance.models.strategies import trees
from lockstep.conformance.models.trees import Again, Block, Linear, Read, Tree


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (NestedWrappedModule, {"": 78, "module.1": 273, "module.1.0": 81, "module.2": 69}),
        (
            AlwaysWrapNestedWrappedModule,
            {"module.0": 36, "module.1.0": 81, "module.1.1": 273, "module.2": 69, "module.3": 42},
        ),
        (NonUniformReqGradNWM, {"": 36, "module.1": 273, "module.1.0": 81, "module.2": 108}),
        (
            TransformerWithSharedParams,
            # 23 x 16 tied, 23 biases, 32 in each of two layer norms, 4 in the batch norm
            {"": 459, "transformer.encoder.layers.0": 1434, "transformer.decoder.layers.0": 2553},
        ),
    ],
)
def test_units_are_of_known_sizes(world, engine, model, sizes):
    sharded = engine.shard(model().to(world.device), ShardSpec(units=model.units, use_orig_params=True))
    assert {group.name: group.full_numel for group in engine.groups(sharded)} == sizes


@pytest.mark.ranks(2)
def test_of_a_mostly_frozen_model_the_last_rank_holds_what_learns(world, engine):
    bare = NonUniformReqGradNWM().to(world.device)
    model = engine.shard(bare, ShardSpec(units=bare.units, use_orig_params=True))
    model.loss(model(torch.full((4, 8), 1.0 + world.rank, device=world.device))).backward()
    mine = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
    assert world.gather(mine) == [0, 40]


def test_in_half_computes_in_fp16_and_learns_in_fp32():
    torch.manual_seed(0)
    bare = nn.Linear(2, 2)
    x = torch.tensor([[0.1, 0.3]])
    output = InHalf(bare)(x)
    assert torch.equal(output, nn.functional.linear(x.half(), bare.weight.half(), bare.bias.half()))
    output.sum().backward()
    assert torch.equal(bare.weight.grad, x.half().float().expand(2, 2))


def test_the_transformer_learns_its_tied_weight_from_both_ends():
    model = TransformerWithSharedParams()
    assert model.output_proj.weight is model.embed_tokens.weight
    src, tgt = torch.zeros(6, 2, dtype=torch.long), torch.ones(4, 2, dtype=torch.long)
    model.loss(model(src, tgt), tgt).backward()
    # An embedding learns the words that it reads (0 and 1), a projection those that it distinguishes (all).
    assert model.embed_tokens.weight.grad.any(dim=1).all()
    untied = TransformerWithSharedParams()
    untied.output_proj.weight = nn.Parameter(model.output_proj.weight.detach().clone())
    untied.loss(untied(src, tgt), tgt).backward()
    assert untied.embed_tokens.weight.grad.any(dim=1).tolist() == [True, True] + [False] * 21


def test_a_late_rank_pauses_before_gradients_and_after_backward(monkeypatch):
    pauses = []
    pause = "lockstep.conformance.models.nested.pause"
    monkeypatch.setattr(pause, lambda device, milliseconds: pauses.append(milliseconds))
    model = NestedWrappedModuleWithDelay(delay_after_loss_ms=5, delay_before_reduction_ms=2)
    loss = model.loss(model(model.batch(torch.Generator())))
    assert pauses == []
    loss.backward()
    assert pauses == [2, 2, 2, 2]
    model.after_backward(loss)
    assert pauses == [2, 2, 2, 2, 5]


def test_a_late_expert_pauses_as_its_forward_ends(monkeypatch):
    pauses = []
    pause = "lockstep.conformance.models.nested.pause"
    monkeypatch.setattr(pause, lambda device, milliseconds: pauses.append(milliseconds))
    model = MixtureOfExperts(0, delay_before_free_ms=5)
    model(model.batch(torch.Generator()))
    assert pauses == [5]


@pytest.mark.ranks(2)
def test_ranks_share_all_layers_but_their_experts(world):
    torch.manual_seed(0)
    model = MixtureOfExperts(world.rank).to(world.device)
    model.backward(model.loss(model(torch.full((4, 8), 1.0 + world.rank, device=world.device))))
    weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    for name, weight in weights.items():
        for values in (weight.detach(), weight.grad):
            first, second = world.gather(values.cpu())
            assert torch.equal(first, second) == (not name.startswith(model.expert)), name


def test_what_trees_are_to_lack_no_tree_has() -> None:
    seen = Counter[str]()

    @settings(max_examples=50, database=None, derandomize=True)
    @given(trees(frozen=False, shared=False, idle=False, recomputed=False))
    def draw(tree: Tree) -> None:
        for _, part in tree.named_parts():
            seen[type(part).__name__] += 1
            assert (part.calls, part.used, part.frozen) == (1, "always", False)
            assert not getattr(part, "recomputed", False)

    draw()
    assert seen.keys() == {"Linear", "Gain", "Offset", "Block"}


def test_a_copier_makes_deep_copies_of_a_model_as_it_was() -> None:
    model = TransformerWithSharedParams()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copied = copier(model)
    with torch.no_grad():
        model.embed_tokens.weight.zero_()
    first, second = copied(), copied()
    first.embed_tokens.weight.data.fill_(1.0)
    assert second.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.state_dict().items())
    assert second.output_proj.weight is second.embed_tokens.weight
    assert isinstance(second.output_proj.weight, nn.Parameter)


READ = Block((Read("0.0"),))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((Block((Linear(), READ), unit=True),), (True, True)),
        ((Block((Linear(),), unit=True), READ), (False, True)),
        ((Block((Linear(), READ), unit=True), Again("0.1")), (False, True)),
        ((Block((Linear(), READ), unit=True), Again("0")), (True, True)),
        ((Block((Linear(), READ), unit=True), Block((Again("0.1"),))), (False, True)),
        ((Block((Linear(), READ, Block((Again("0.1"),))), unit=True), Again("0.2")), (False, True)),
        ((READ, Block((Linear(),), unit=True)), (False, False)),
    ],
    ids=["inside", "outside", "again_outside", "unit_again", "again_in_a_block", "again_twice", "before"],
)
def test_a_tree_knows_where_weights_are_read(parts: Any, expected: tuple[bool, bool]) -> None:
    """In every forward they are there: of units that free them after theirs, and of those that keep them."""
    tree = Tree(1, parts) if parts[0] is not READ else Tree(1, (Block((Read("1.0"),)), parts[1]))
    assert (
        tree.reads_kept_weights(whole=False, kept=False),
        tree.reads_kept_weights(False, True),
    ) == expected
