"""Layouts, and the rest of the harness: schedules, faults, goldens, drawn layouts, counts in fake worlds."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from plan import Plan, PlanOfManyRows, RacingPlan, batches, build, loss

from lockstep.layouts import Layout, assert_same_as_unsharded
from lockstep.layouts.strategies import layout_sizes

ON_DP = pytest.mark.layouts(dp=(1, 2))


@ON_DP
def test_right(layout):
    assert_same_as_unsharded(layout, build, Plan, batches(), loss)


@ON_DP
def test_race(layout):
    assert_same_as_unsharded(layout, build, RacingPlan, batches(), loss)


@ON_DP
def test_corrupted(layout, faults):
    faults.corrupt(rank=1, op="all_reduce", nth=3)
    assert_same_as_unsharded(layout, build, Plan, batches(), loss)


@ON_DP
def test_killed(layout, faults):
    faults.kill(rank=1, before="all_reduce", nth=3)
    assert_same_as_unsharded(layout, build, Plan, batches(), loss)


@pytest.mark.layouts(dp=(1, 2), tp=(1, 2), at_most=2)
def test_golden(layout, golden):
    with golden(layout.name) as run:
        run.record("mine", layout.slice(torch.arange(4), "dp"))


@pytest.mark.ranks(2)
@settings(max_examples=30)
@given(sizes=layout_sizes(2, dp=(1, 2), tp=(1, 2)), rows=st.integers(13, 30))
def test_drawn(world, sizes, rows):
    with Layout(sizes) as layout:
        assert_same_as_unsharded(layout, build, PlanOfManyRows, batches(rows), loss)


@pytest.mark.layouts(dp=(2, 64), tp=(1, 16), at_most=1024, backend="fake", as_rank=1)
def test_counts(layout, collectives):
    dist.all_reduce(torch.ones(3), group=layout.group("dp"))
    if layout["tp"] > 1:
        for axes in (("tp",), ("dp", "tp")):
            dist.all_reduce(torch.ones(5), group=layout.group(*axes))
    found = {axes: [each.nbytes for each in of] for axes, of in layout.by_axes(collectives).items()}
    assert found == ({"dp": [12]} if layout["tp"] == 1 else {"dp": [12], "tp": [20], "dp-tp": [20]})
    assert layout.at("tp") == (1 if layout["tp"] > 1 else 0)
