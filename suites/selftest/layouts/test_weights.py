"""The words for parts of a batch, and wrong losses of blocks without ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lockstep.layouts.weights import Counting, Weighing, _are
from suites.selftest.layouts.test_hypotheses import weighing


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
