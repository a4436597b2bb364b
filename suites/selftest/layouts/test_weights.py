"""Parts of a batch that count wrongly in a gradient or a loss, named without ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lockstep.layouts.diagnosis import Failure
from lockstep.layouts.reference import Blocks
from lockstep.layouts.weights import Counting, Weighing, _are
from suites.selftest.layouts.model import SHARDS, OnPaper


def weights(number: int) -> torch.Tensor:
    """Return unequal weights of so many blocks, which add up to 1."""
    found = torch.arange(number, dtype=torch.float64) * 0.37 % 1 + 0.5
    return found / found.sum()


def weighing(rows: int, sequence: int = 1, microbatches: int = 1, **axes: int) -> Weighing:
    """Return blocks of random gradients that have unequal weights in the whole batch."""
    generator = torch.Generator().manual_seed(0)
    number = rows * sequence
    found = torch.randn(number, 40, generator=generator, dtype=torch.float64)
    losses = tuple(torch.rand(number, generator=generator, dtype=torch.float64).tolist())
    blocks = Blocks(rows, sequence, (), losses, {"w": found}, {"w": weights(number) @ found})
    return Weighing(blocks, axes, {**axes, **({"cp": sequence} if sequence > 1 else {})}, microbatches)


def explained(of: Weighing, ratios: torch.Tensor) -> list[str]:
    """Return how a gradient is explained in which each block counts so many times."""
    assert of.blocks.weights is not None
    return of.explain({"w": (of.blocks.weights * ratios) @ of.blocks.gradients["w"]})


def kept(number: int, *lost: int) -> torch.Tensor:
    return torch.ones(number, dtype=torch.float64).index_fill(0, torch.tensor(lost), 0.0)


@pytest.mark.parametrize(
    ("sizes", "labels", "words"),
    [
        ({"microbatch": 3}, [1], "microbatch 1 of 3"),
        ({"microbatch": 3}, [2, 0], "microbatches 0, 2 of 3"),
        ({"dp part": 4}, [1, 3], "dp parts 1, 3 of 4"),
        ({"dp part": 2, "microbatch": 3}, [4], "dp part 1 with microbatch 1"),
        (
            {"dp part": 2, "microbatch": 3},
            [0, 2, 5],
            "dp part 0 with microbatch 0, dp part 0 with microbatch 2, dp part 1 with microbatch 2",
        ),
        (
            {"a": 2, "b": 2, "c": 2},
            [1, 2, 4, 7, 6],
            "a 0 with b 0 with c 1, a 0 with b 1 with c 0, a 1 with b 0 with c 0 and 2 more",
        ),
    ],
)
def test_parts_are_named_by_their_words(sizes: dict[str, int], labels: list[int], words: str) -> None:
    counting = Counting(sizes, torch.zeros(1))
    assert counting.describe(labels) == words
    assert counting.what == " and ".join(sizes)
    assert counting.count == math.prod(sizes.values())


def test_blocks_are_numbered_by_one_word_and_by_more() -> None:
    of = weighing(4, sequence=2, microbatches=2, dp=2)
    found = [{(each.what, tuple(each.labels.tolist())) for each in countings} for countings in of.countings()]
    by_half, by_pair, by_turn = (0,) * 4 + (1,) * 4, (0, 0, 1, 1) * 2, (0, 1) * 4
    assert found[0] == {
        ("dp part", by_half),
        ("dp part", by_pair),
        ("microbatch", by_half),
        ("microbatch", by_pair),
        ("sequence part", by_turn),
    }
    assert {what for what, _ in found[1]} == {
        "dp part and sequence part",
        "dp part and microbatch",
        "sequence part and microbatch",
    }
    assert ("dp part and microbatch", (0, 0, 1, 1, 2, 2, 3, 3)) in found[1]
    assert ("dp part and microbatch", (0, 0, 2, 2, 1, 1, 3, 3)) in found[1]
    assert ("sequence part and microbatch", (0, 2, 0, 2, 1, 3, 1, 3)) in found[1]
    assert {what for what, _ in found[2]} == {"dp part and sequence part and microbatch"}
    assert len(found) == 3


def test_nothing_to_count_has_no_numbering() -> None:
    assert list(weighing(2).countings()) == []


def test_values_are_alike_but_for_rounding_and_unknown_ones() -> None:
    assert _are([], 1.0)
    assert _are([math.nan], 1.0)
    assert _are([1.0, math.nan, 1 + 5e-8], 1.0)
    assert not _are([1.0, 1 + 2e-7], 1.0)
    assert not _are([1 - 2e-7], 1.0)
    assert _are([0.0, 5e-8], 0.0)
    assert _are([1000.0, 1000.00005], 1000.0)
    assert not _are([1000.0, 1000.0002], 1000.0)


def parts(of: Weighing) -> torch.Tensor:
    """Return what each block adds to the loss."""
    assert of.blocks.weights is not None
    return of.blocks.weights * torch.tensor(of.blocks.losses, dtype=torch.float64)


def test_a_loss_without_some_parts_is_explained() -> None:
    of = weighing(4, dp=2, fsdp=2)
    each = parts(of)
    whole = float(each.sum())
    assert of.explain_loss(whole - float(each[:2].sum())) == [
        "lacks dp part 0 of 2",
        "lacks fsdp part 0 of 2",
    ]
    one = ["lacks dp part 0 with fsdp part 1", "lacks dp part 1 with fsdp part 0"]
    assert of.explain_loss(whole - float(each[1])) == one
    assert of.explain_loss(whole * 1.2345) == []
    assert of.explain_loss(0.0) == []


def test_a_loss_that_is_a_mean_of_means_is_explained() -> None:
    of = weighing(4, dp=4)
    losses = torch.tensor(of.blocks.losses, dtype=torch.float64)
    assert of.explain_loss(float(losses.mean())) == ["is a mean of the means of each dp part"]


def test_of_many_parts_only_one_is_taken_from_a_loss() -> None:
    for size, known in ((6, True), (7, False)):
        of = weighing(size, dp=size)
        each = parts(of)
        whole = float(each.sum())
        assert of.explain_loss(whole - float(each[2])) == [f"lacks dp part 2 of {size}"]
        found = of.explain_loss(whole - float(each[2] + each[4]))
        assert found == ([f"lacks dp parts 2, 4 of {size}"] if known else [])


def test_a_loss_is_not_explained_by_blocks_of_which_it_is_no_sum() -> None:
    of = weighing(4, dp=2)
    whole = float(parts(of).sum())
    other = replace(of.blocks, whole={"w": torch.randn(40, dtype=torch.float64)})
    assert replace(of, blocks=other).explain_loss(whole / 2) == []
    assert replace(of, blocks=other).explain({"w": of.blocks.whole["w"]}) == []
    assert math.isnan(of.loss_of({}))


@pytest.mark.parametrize(
    ("ratios", "texts"),
    [
        ([1, 3], ["counts dp part 1 of 2 3 times"]),
        ([0.5, 1], ["counts dp part 0 of 2 0.5 times"]),
        ([0, 1], ["lacks dp part 0 of 2"]),
        ([2, 0], ["lacks dp part 1 of 2, and counts the others 2 times"]),
        ([2, 2], []),
        ([2, 3], []),
        ([1, 1], []),
        ([1, 2, 2], ["counts dp parts 1, 2 of 3 2 times"]),
        ([0, 2, 3], []),
        ([1, 2, 3], []),
    ],
)
def test_parts_that_count_otherwise_are_named(ratios: list[float], texts: list[str]) -> None:
    of = weighing(len(ratios), dp=len(ratios))
    assert of.blocks.weights is not None
    weights = of.blocks.weights * torch.tensor(ratios, dtype=torch.float64)
    assert of.explain({"w": weights @ of.blocks.gradients["w"]}) == texts


def test_a_lost_part_of_two_axes_of_one_size_is_that_of_either() -> None:
    of = weighing(4, dp=2, fsdp=2)
    assert explained(of, kept(4, 2, 3)) == ["lacks dp part 1 of 2", "lacks fsdp part 1 of 2"]
    assert explained(of, kept(4, 3)) == ["lacks dp part 1 with fsdp part 1"]


def test_a_lost_part_of_axes_of_two_sizes_is_named() -> None:
    of = weighing(8, dp=2, fsdp=4)
    assert explained(of, kept(8, 4, 5, 6, 7)) == ["lacks dp part 1 of 2"]
    assert explained(of, kept(8, 1, 5)) == ["lacks fsdp part 1 of 4"]


def test_lost_microbatches_of_one_rank_are_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    # Ranks may cut their microbatches, or each microbatch may be cut over ranks.
    both = ["lacks dp part 1 with microbatch 0", "lacks dp part 1 with microbatch 1"]
    assert explained(of, kept(6, 3)) == both
    assert explained(of, kept(6, 0, 3)) == ["lacks microbatch 0 of 3"]
    assert explained(of, kept(6, 0, 1, 3, 4) * 3) == [
        "lacks microbatches 0, 1 of 3, and counts the others 3 times"
    ]


def test_a_mean_over_ranks_and_microbatches_is_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    assert of.blocks.weights is not None
    (found,) = explained(of, 1 / (6 * of.blocks.weights))
    assert found.startswith("is a mean of the means of each dp part and microbatch: they count alike")


def test_a_tensor_that_an_auxiliary_loss_does_not_reach_is_explained_alone() -> None:
    of = weighing(6, microbatches=3, dp=2)
    number = torch.arange(240, dtype=torch.float64).view(6, 40)
    found = {**of.blocks.gradients, "router": number.sin()}
    whole = {**of.blocks.whole, "router": number.cos().sum(0)}  # no sum over blocks
    of = replace(of, blocks=replace(of.blocks, gradients=found, whole=whole))
    assert of.blocks.weights is None
    lost = {"w": torch.tensordot(torch.tensor([1.0, 1, 0, 1, 1, 0]).double() * weights(6), found["w"], 1)}
    assert of.explain(lost) == ["lacks microbatch 2 of 3"]
    assert of.explain({**lost, "router": whole["router"] / 2}) == []


def test_a_part_is_lost_with_what_a_term_adds_to_it() -> None:
    of = weighing(6, microbatches=3, dp=2)
    base, whole = of.blocks.gradients["w"], of.blocks.whole["w"]
    term = replace(of.blocks, gradients={"w": base.cos()}, whole={"w": base.cos().mean(0)})
    stacked = {"w": torch.cat([base, term.whole["w"][None]])}
    losses = (*of.blocks.losses, 1.0)
    blocks = replace(
        of.blocks, terms=("z",), losses=losses, gradients=stacked, whole={"w": whole + term.whole["w"]}
    )
    of = replace(of, blocks=blocks)
    lost = kept(6, 1, 4)
    wrong = {"w": (lost * weights(6)) @ base + lost @ base.cos() / 6}
    assert of.explain(wrong) == []
    assert of.explain({"w": (lost * weights(6)) @ base + term.whole["w"]}) == ["lacks microbatch 1 of 3"]
    assert of.explain({"w": (lost * weights(6)) @ base + 2 * term.whole["w"]}) == []  # two things are wrong
    joined = of.with_terms([term])
    assert joined is not None
    assert joined.explain(wrong) == ["lacks microbatch 1 of 3"]
    of_both = (weights(6) + 1 / 6) * torch.tensor(losses[:6], dtype=torch.float64)
    assert joined.blocks.losses == pytest.approx(of_both.tolist(), rel=1e-9)
    assert of.with_terms([replace(term, whole={"w": whole.sin()})]) is None


def with_term() -> tuple[Weighing, Weighing]:
    """Return the blocks of a loss that has a term, and those of the term."""
    of = weighing(6, microbatches=3, dp=2)
    base = of.blocks.gradients["w"]
    parts, share = base.cos(), weights(6).flip(0)
    term = replace(of, blocks=replace(of.blocks, gradients={"w": parts}, whole={"w": share @ parts}))
    whole = {"w": of.blocks.whole["w"] + term.blocks.whole["w"]}
    stacked = {"w": torch.cat([base, term.blocks.whole["w"][None]])}
    losses = (*of.blocks.losses, 1.0)
    blocks = replace(of.blocks, terms=("z",), losses=losses, gradients=stacked, whole=whole)
    return replace(of, blocks=blocks), term


def test_a_term_of_the_loss_that_is_wrong_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    of, term = with_term()
    monkeypatch.setattr(Failure, "_weighing", lambda self, name: term if name else of)
    failure = Failure(OnPaper(dp=2), SHARDS, cast(Any, None), 3, {}, {})
    lost = (kept(6, 1, 4) * weights(6).flip(0)) @ term.blocks.gradients["w"]
    gradient = of.blocks.whole["w"] - term.blocks.whole["w"] + lost
    assert failure.explain({"w": gradient}) == [
        "has a wrong term `z` of the loss, which lacks microbatch 1 of 3"
    ]


def test_a_loss_without_a_term_is_named() -> None:
    of, _ = with_term()
    whole = float(weights(6) @ torch.tensor(of.blocks.losses[:6], dtype=torch.float64))
    assert of.explain_loss(whole) == ["lacks the term `z` of the loss"]
    assert of.explain_loss(whole + 2) == [
        "has the term `z` of the loss as 2 times the reference: multiplied by dp (2) once too often"
    ]


def test_parts_that_count_at_random_are_not_named() -> None:
    of = weighing(4, sequence=2, dp=4)
    assert explained(of, torch.rand(8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)) == []


def test_a_loss_without_a_part_is_named() -> None:
    of = weighing(6, microbatches=3, dp=2)
    assert of.blocks.weights is not None
    shares = of.blocks.weights * torch.tensor(of.blocks.losses, dtype=torch.float64)
    assert of.explain_loss(float(shares[:3].sum())) == ["lacks dp part 1 of 2"]
    assert of.explain_loss(float(shares[[0, 3]].sum())) == ["lacks microbatches 1, 2 of 3"]
    assert of.explain_loss(float(shares.sum()) * 1.01) == []


def test_the_loss_of_blocks_that_count_as_in_gradients_is_known() -> None:
    of = weighing(4, dp=2, fsdp=2)
    assert of.blocks.weights is not None
    found = of.blocks.weights * torch.tensor([1.0, 2, 0, 3], dtype=torch.float64)
    loss = float(found @ torch.tensor(of.blocks.losses, dtype=torch.float64))
    assert of.loss_of({"w": found @ of.blocks.gradients["w"]}) == pytest.approx(loss, rel=1e-9)
    assert math.isnan(of.loss_of({"w": torch.ones(40, dtype=torch.float64)}))
