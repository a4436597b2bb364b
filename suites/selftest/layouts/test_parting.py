"""The place where two runs part: which columns of an output a rank has, and sums that a plan makes later."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.layouts import Layout, Sharded, ShardMap
from lockstep.layouts.factors import CLOSE
from lockstep.layouts.parting import (
    _ROWS,
    _SHORT_ROWS,
    DIFFERENT,
    SAME,
    UNEVEN,
    UNKNOWN,
    Comparison,
    Trace,
    _are_among,
    _are_as_often,
    _are_within,
    describe_parting,
)
from suites.selftest.layouts.model import OnPaper

PAPER = OnPaper(dp=2, tp=2)
WHOLE = torch.randn(24, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def compare(**held: dict[int, torch.Tensor]) -> Comparison:
    """Return the comparison of what ranks hold with the same rows, by module."""
    by_rank = {rank: {name: each[rank] for name, each in held.items()} for rank in range(4)}
    return Comparison(PAPER, ShardMap({"up.weight": Sharded("tp")}), dict.fromkeys(held, WHOLE), by_rank)


def rows(rank: int) -> torch.Tensor:
    return WHOLE.chunk(2)[PAPER.at("dp", rank)]


def test_columns_are_those_of_the_axis_that_cuts_them() -> None:
    cut = {rank: rows(rank).chunk(2, 1)[PAPER.at("tp", rank)] for rank in range(4)}
    other = {rank: each + 1 for rank, each in cut.items()}
    found = compare(head=cut, up=cut, down=other)
    assert (found.status("head"), found.status("up"), found.status("down")) == (SAME, SAME, DIFFERENT)


def test_ranks_with_the_same_columns_have_all_rows() -> None:
    of_dp_0 = {rank: WHOLE.chunk(2)[0].chunk(2, 1)[PAPER.at("tp", rank)] for rank in range(4)}
    assert compare(up=of_dp_0).status("up") == UNEVEN


@pytest.mark.parametrize(
    ("first", "second"), [(13, 12), (12, 13), (11, 12)], ids=["twice", "lost", "dropped"]
)
def test_rows_that_ranks_read_twice_or_never_are_named(first: int, second: int) -> None:
    read = {rank: WHOLE[second:] if PAPER.at("dp", rank) else WHOLE[:first] for rank in range(4)}
    found = compare(embed=read, head={rank: each + 1 for rank, each in read.items()})
    text = "first divergence: the rows of the batch, of which ranks read some more often than others"
    assert describe_parting(found, found) == text


def test_a_rank_may_have_no_rows() -> None:
    none = dict.fromkeys(range(4), WHOLE[:0])
    of_dp_0 = {rank: WHOLE if PAPER.at("dp", rank) == 0 else WHOLE[:0] for rank in range(4)}
    found = compare(embed=of_dp_0, head=none)
    assert (found.status("embed"), found.status("head")) == (SAME, UNEVEN)


@pytest.mark.layouts(dp=(2,), tp=(2,))
def test_axes_that_the_layout_itself_looks_at_are_not_asked_for(layout: Layout) -> None:
    layout.asked.clear()
    assert layout.members(["tp"]) == [2 * (layout.rank // 2), 2 * (layout.rank // 2) + 1]
    assert layout.by_axes([]) == {}
    assert layout.asked == set()
    layout.part(("cp", "tp"))
    assert layout.asked == {"cp", "tp"}


def test_a_loss_that_goes_wrong_itself_is_named() -> None:
    right = {rank: rows(rank) for rank in range(4)}
    wrong = {rank: each + 1 for rank, each in right.items()}
    outputs, gradients = compare(embed=right, head=right), compare(embed=wrong, head=wrong)
    text = "all outputs agree, the gradient of the last one (`head`) differs: look at the loss"
    assert describe_parting(outputs, gradients) == text


def test_modules_that_a_forward_calls_several_times_are_left_out() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act)
    trace = Trace()
    with trace.record(model):
        for _ in range(3):
            model(torch.ones(4, 2)).sum().backward()
    assert [list(each) for each in trace.joined()] == [["0", "2", ""]] * 2


def test_of_columns_in_a_cut_of_the_plan_nothing_is_said() -> None:
    chunks = {0: (0, 3), 1: (1, 2)}
    cut = {
        rank: torch.cat([rows(rank).chunk(4, 1)[each] for each in chunks[PAPER.at("tp", rank)]], dim=1)
        for rank in range(4)
    }
    mixed = {rank: torch.cat([each[:, :2], each[:, 2:].roll(1, 0)], 1) for rank, each in cut.items()}
    found = compare(out=cut, up=cut, down=mixed)
    assert (found.status("out"), found.status("up"), found.status("down")) == (UNKNOWN, DIFFERENT, DIFFERENT)


def test_a_sum_that_is_made_later_is_not_missing() -> None:
    right = {rank: rows(rank) for rank in range(4)}
    half = {rank: each / 2 for rank, each in right.items()}
    wrong = {rank: each + 1 for rank, each in right.items()}
    outputs = compare(embed=right, up=right, norm=right, head=right)
    later = compare(embed=wrong, up=right, norm=half, head=right)
    missing = compare(embed=wrong, up=wrong, norm=half, head=right)
    place = "first divergence: the gradient of the output of"
    assert describe_parting(outputs, later) == f"{place} `embed`; all outputs agree"
    assert (
        describe_parting(outputs, missing) == f"{place} `norm`, which lacks a sum over tp; all outputs agree"
    )
    wrong_outputs = compare(embed=right, out=half, head=wrong)
    text = "first divergence: the output of `head`; that of `out` is right after a sum over tp"
    assert describe_parting(wrong_outputs, later) == text


def test_each_short_row_is_looked_for() -> None:
    whole = torch.arange(12.0).view(2, 6)
    assert _are_within(torch.tensor([[0.0, 5.0], [8.0, 6.0]]), whole)
    assert not _are_within(torch.tensor([[0.0, 5.0], [8.0, 0.0]]), whole)  # of two rows
    rounded = torch.tensor([[0.0, 5.0], [8.0, 6.0]], dtype=torch.float64) + CLOSE * 5
    assert _are_within(rounded, whole.double())
    assert not _are_within(rounded + CLOSE * 20, whole.double())


class Mixed(nn.Module):
    """A model of which some outputs cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 3)
        self.flat, self.bare, self.none = nn.Flatten(0), nn.Identity(), Returns(None)
        self.whole, self.several = nn.Identity(), Returns(())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.none(given), self.bare(given), self.whole(given.long()), self.several(given)
        return self.flat(self.lin(given))


class Returns(nn.Module):
    def __init__(self, found: object) -> None:
        super().__init__()
        self.found = found

    def forward(self, given: torch.Tensor) -> object:
        return self.found


def test_outputs_of_rows_are_traced_while_a_step_is_recorded() -> None:
    model, trace = Mixed(), Trace()
    assert trace.joined() == ({}, {})
    given = torch.ones(2, 4, 2)
    with trace.record(model, lambda name: name.upper()):
        model(given).sum().backward()
    model(given)
    outputs, gradients = trace.joined()
    assert {name: each.shape for name, each in outputs.items()} == {"BARE": (8, 2), "LIN": (8, 3)}
    assert gradients["LIN"].tolist() == [[1.0] * 3] * 8
    assert list(gradients) == ["LIN"]
    assert not outputs["LIN"].requires_grad


def test_outputs_of_several_microbatches_are_joined_where_they_are_as_wide() -> None:
    model, trace = nn.Sequential(nn.Identity(), nn.Identity()), Trace()
    with trace.record(model):
        model(torch.ones(2, 3))
        model(torch.zeros(1, 3))
    assert trace.joined()[0]["0"].tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    with trace.record(model):
        model(torch.zeros(1, 2))
    assert trace.joined() == ({}, {})


def test_of_an_output_that_no_rank_has_or_that_is_zero_nothing_is_said() -> None:
    right = {rank: rows(rank) for rank in range(4)}
    found = compare(up=right)
    assert replace(found, by_rank={0: {}, 1: {}}).status("up") == UNKNOWN
    assert replace(found, whole={"up": WHOLE * 0}).status("up") == UNKNOWN
    assert replace(found, whole={"up": WHOLE[:, :5]}).status("up") == UNKNOWN


def test_an_output_that_is_too_large_by_a_factor_is_the_same_without_it() -> None:
    right = {rank: rows(rank) for rank in range(4)}
    found = compare(up={rank: each * 3 for rank, each in right.items()})
    assert found.factor("up") == pytest.approx(3)
    assert (found.status("up"), found.status("up", 3.0)) == (DIFFERENT, SAME)
    for wrong in (
        {rank: each[:, :3] for rank, each in right.items()},
        {rank: each * 0 for rank, each in right.items()},
        {rank: each.flip(1) for rank, each in right.items()},
    ):
        assert compare(up=wrong).factor("up") == 1.0
    assert replace(found, by_rank={}).factor("up") == 1.0


def test_the_factor_of_a_single_column_is_that_of_its_largest_value() -> None:
    column = WHOLE[:, :1]
    for factor in (1.0, 3.0):
        by_rank = {rank: {"up": column.chunk(2)[PAPER.at("dp", rank)] * factor} for rank in range(4)}
        found = replace(compare(up=dict.fromkeys(range(4), WHOLE)), whole={"up": column}, by_rank=by_rank)
        assert found.factor("up") == pytest.approx(factor)
        assert found.status("up", factor) == SAME
    assert replace(found, whole={"up": column * 0}).factor("up") == 1.0


def test_columns_may_be_those_of_the_rows_of_a_weight() -> None:
    shards = ShardMap({"up.weight": Sharded("tp", parts=(4, 4)), "down.weight": Sharded("tp", dim=1)})
    cut = {
        rank: torch.cat([each.chunk(2, 1)[PAPER.at("tp", rank)] for each in rows(rank).chunk(2, 1)], 1)
        for rank in range(4)
    }
    found = replace(compare(up=cut, down=cut), shards=shards)
    assert (found.status("up"), found.status("down")) == (SAME, DIFFERENT)


def test_columns_that_a_weight_is_padded_with_are_zero() -> None:
    whole = WHOLE[:, :7]
    cut = {rank: whole.chunk(2)[PAPER.at("dp", rank)].chunk(2, 1)[PAPER.at("tp", rank)] for rank in range(4)}
    padded = {rank: nn.functional.pad(each, (0, 4 - each.shape[1])) for rank, each in cut.items()}
    found = replace(compare(up=padded), whole={"up": whole})
    for is_padded, status in ((True, SAME), (False, UNKNOWN)):
        shards = ShardMap({"up.weight": Sharded("tp", padded=is_padded)})
        assert replace(found, shards=shards).status("up") == status
    other = {rank: torch.cat([each[:, :3], whole[: len(each), 6:]], 1) for rank, each in padded.items()}
    assert replace(found, by_rank={rank: {"up": each} for rank, each in other.items()}).status("up") != SAME


def test_columns_that_an_output_does_not_have_are_left_out() -> None:
    shards = ShardMap({"up.weight": Sharded("tp", rows=lambda length, count, index: [index, 2, 8, 9])})
    cut = {rank: rows(rank)[:, [PAPER.at("tp", rank), 2]] for rank in range(4)}
    assert replace(compare(up=cut), shards=shards).status("up") == SAME


def test_a_sum_of_parts_in_columns_of_one_axis_is_named() -> None:
    half = {rank: rows(rank).chunk(2, 1)[PAPER.at("tp", rank)] / 2 for rank in range(4)}
    layout = OnPaper(fsdp=2, dp=2, tp=2)
    by_rank = {rank: {"up": half[rank % 4]} for rank in range(8)}
    found = replace(compare(up=half), layout=layout, by_rank=by_rank)
    assert found.status("up") == "a sum over fsdp"
    of_some = {rank: each for rank, each in by_rank.items() if rank < 4}
    assert replace(found, by_rank=of_some).status("up") == DIFFERENT


def test_columns_that_one_rank_lacks_are_different() -> None:
    mixed = {rank: rows(rank)[:, [0, 3, 5, 6]] for rank in range(4)}
    assert compare(out=mixed).status("out") == UNKNOWN
    assert compare(out={**mixed, 2: mixed[2] + 1}).status("out") == DIFFERENT


def test_the_first_output_or_gradient_that_differs_is_named() -> None:
    right = {rank: rows(rank) for rank in range(4)}
    wrong = {rank: each + 1 for rank, each in right.items()}
    first = "first divergence: the output of"
    same = compare(embed=right, up=right, head=right)
    assert describe_parting(compare(embed=wrong, head=right), same) == f"{first} `embed`"
    assert describe_parting(compare(embed=right, head=wrong), same) == f"{first} `head`"
    assert describe_parting(compare(embed=right, **{"": wrong}), same) == f"{first} the model"
    assert (
        describe_parting(same, same) == "all outputs and their gradients agree: it goes wrong after backward"
    )
    none = replace(same, whole={})
    assert describe_parting(none, none) == ""
    assert describe_parting(same, none) == ""
    unknown = replace(same, whole=dict.fromkeys(same.whole, WHOLE * 0))
    assert describe_parting(unknown, same) == ""
    assert describe_parting(same, unknown) == ""
    doubled = {rank: each * 2 for rank, each in right.items()}
    scaled = compare(embed=wrong, up=doubled, head=doubled)
    place = "first divergence: the gradient of the output of"
    assert describe_parting(same, scaled) == f"{place} `embed`; all outputs agree"
    uneven = dict.fromkeys(range(4), WHOLE[:12])
    of_half = compare(embed=uneven, up=right, head=right)
    assert describe_parting(same, of_half) == f"{place} `embed`; all outputs agree"


def test_rows_are_compared_within_rounding_in_any_order() -> None:
    some = WHOLE[[3, 1, 3]]
    allowed = CLOSE * float(WHOLE.abs().max())
    assert _are_among(some, WHOLE)
    assert _are_among(some + allowed * 0.9, WHOLE)
    assert not _are_among(some + allowed * 1.1, WHOLE)
    assert not _are_among(some * math.nan, WHOLE)
    assert not _are_among(torch.cat([some, WHOLE[:1] + 1]), WHOLE)
    assert not _are_among(some[:, :3], WHOLE)
    assert _are_among(WHOLE[:0], WHOLE)


def test_of_many_rows_some_are_compared() -> None:
    many = WHOLE.repeat(2 * _ROWS // 24 + 1, 1)
    assert _are_among(many, WHOLE)
    odd, even = many.clone(), many.clone()
    odd[1::2] += 1
    even[::2] += 1
    assert (_are_among(odd, WHOLE), _are_among(even, WHOLE)) == (True, False)


def test_rows_that_occur_equally_often_are_whole() -> None:
    assert _are_as_often(WHOLE.flip(0), WHOLE)
    assert _are_as_often(torch.cat([WHOLE, WHOLE]), WHOLE)
    assert not _are_as_often(torch.cat([WHOLE, WHOLE[:1]]), WHOLE)
    assert not _are_as_often(WHOLE[1:], WHOLE)
    assert not _are_as_often(WHOLE[:0], WHOLE)
    assert _are_as_often(torch.cat([WHOLE, WHOLE[:1]]), torch.cat([WHOLE[:1], WHOLE]))


def test_short_rows_are_looked_for_only_where_they_are_finite_and_shorter() -> None:
    whole = torch.arange(12.0).view(2, 6)
    assert not _are_within(whole, whole)
    assert not _are_within(torch.tensor([[0.0, math.inf]]), whole)
    many = torch.tensor([[0.0, 5.0]]).repeat(2 * _SHORT_ROWS, 1)
    many[1::2] = 0.5
    assert _are_within(many, whole)
    assert not _are_within(many.flip(0), whole)
