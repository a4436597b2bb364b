"""The elements of the unsharded tensors that a rank has, on layouts without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from lockstep.layouts import Sharded, ShardMap
from lockstep.layouts import shards as module
from lockstep.layouts.shards import PADDING, region_of, take
from suites.selftest.layouts.model import OnPaper

LAYOUT = OnPaper(dp=2, tp=3)
"""Rank 4 has dp 1 and tp 1."""


def regions(cut: Any, shape: tuple[int, ...], **sizes: int) -> list[Any]:
    """Return what each rank holds of a tensor with one rule."""
    layout = OnPaper(**sizes) if sizes else OnPaper(tp=3)
    ranks = range(2 if sizes else 3)
    return [ShardMap({"w": cut}).region("w", shape, layout, rank).tolist() for rank in ranks]


def test_a_dimension_is_cut_as_torch_chunks_it() -> None:
    assert regions(Sharded("tp"), (7,)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert regions(Sharded("tp"), (4,)) == [[0, 1], [2, 3], []]
    assert regions(Sharded("tp", dim=1), (2, 3)) == [[[0], [3]], [[1], [4]], [[2], [5]]]
    assert regions(Sharded("tp", dim=-2), (3, 2)) == [[[0, 1]], [[2, 3]], [[4, 5]]]


def test_a_padded_cut_has_as_much_on_all_ranks() -> None:
    assert regions(Sharded("tp", padded=True), (7,)) == [[0, 1, 2], [3, 4, 5], [6, PADDING, PADDING]]
    assert regions(Sharded("tp", padded=True), (4,)) == [[0, 1], [2, 3], [PADDING, PADDING]]
    cut = Sharded("tp", dim=1, padded=True)
    assert regions(cut, (2, 5)) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4, PADDING], [9, PADDING]]]
    assert PADDING == -1


def test_each_of_packed_parts_is_cut() -> None:
    assert regions(Sharded("tp", parts=(4, 2)), (6,), tp=2) == [[0, 1, 4], [2, 3, 5]]
    padded = Sharded("tp", parts=(3, 2), padded=True)
    assert regions(padded, (5,), tp=2) == [[0, 1, 3], [2, PADDING, 4]]
    with pytest.raises(
        ValueError,
        match=r"\Athe shard map's entry of `w`: parts=\(4, 2\) of a dimension of 7: they are 6",
    ):
        regions(Sharded("tp", parts=(4, 2)), (7,))


def test_rows_are_asked_for_with_one_rank_too() -> None:
    asked = []

    def rows(length: int, count: int, index: int) -> list[int]:
        asked.append((length, count, index))
        return [length - 1 - index, 0]

    assert regions(Sharded("tp", rows=rows), (5,)) == [[4, 0], [3, 0], [2, 0]]
    assert ShardMap({"w": Sharded("cp", rows=rows)}).region("w", (5,), OnPaper(cp=1, tp=2), 1).tolist() == [
        4,
        0,
    ]
    assert asked == [(5, 3, 0), (5, 3, 1), (5, 3, 2), (5, 1, 0)]
    assert Sharded("tp", rows=rows).indices(5, 0, 2).dtype == torch.int64


def test_cuts_of_several_axes_follow_each_other() -> None:
    layout = OnPaper(dp=2, tp=2)
    outermost = ShardMap({"w": Sharded(("tp", "dp"))})
    assert [outermost.region("w", (4,), layout, rank).tolist() for rank in range(4)] == [[0], [2], [1], [3]]
    both = ShardMap({"w": (Sharded("tp"), Sharded("dp", dim=1))})
    assert [both.region("w", (2, 2), layout, rank).tolist() for rank in range(4)] == [
        [[0]],
        [[2]],
        [[1]],
        [[3]],
    ]
    again = ShardMap({"w": [Sharded("tp"), Sharded("dp")]})
    assert [again.region("w", (4,), layout, rank).tolist() for rank in range(4)] == [[0], [2], [1], [3]]
    none = ShardMap({"w": (Sharded("cp"), Sharded("tp"))})
    assert none.region("w", (2,), OnPaper(cp=1, tp=2), 1).tolist() == [1]
    assert both.axes("w") == {"tp", "dp"}
    assert outermost.axes("w") == {"tp", "dp"}
    assert both.axes("other") == set()


def test_the_first_glob_that_matches_holds() -> None:
    first, second = Sharded("tp"), Sharded("tp", dim=1)
    shards = ShardMap({"up.*": first, "*.weight": [second, first]})
    assert shards.rule("up.weight") == (first,)
    assert shards.rule("down.weight") == (second, first)
    assert shards.rule("down.bias") == ()
    assert shards.region("down.bias", (2, 2), OnPaper(tp=2), 1).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("rule", ["tp", ("tp",), [Sharded("tp"), "dp"], 3, {Sharded("tp"): 1}])
def test_a_rule_that_is_no_cut_is_refused(rule: Any) -> None:
    with pytest.raises(TypeError) as caught:
        ShardMap({"right": [Sharded("tp")], "w": rule})
    assert str(caught.value) == f"the shard map's entry 'w' is {rule!r}: write Sharded('tp', dim=0)"


def test_a_rule_that_does_not_fit_names_the_parameter() -> None:
    for dim in (2, -3):
        with pytest.raises(ValueError, match=rf"\Athe shard map cuts dim {dim} of `w`, which has 2 dims\Z"):
            regions(Sharded("tp", dim=dim), (2, 2))
    message = r"\Athe shard map cuts `w` over 'cp': the layout has the axes tp\Z"
    with pytest.raises(ValueError, match=message):
        regions(Sharded(("tp", "cp", "ep")), (2, 2))


def test_padding_is_zero_where_elements_are_taken() -> None:
    whole = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    found = take(whole, torch.tensor([3, PADDING, 0]))
    assert found.tolist() == [4.0, 0.0, 1.0]
    assert not found.requires_grad
    shards = ShardMap({"w": Sharded("tp", dim=1)})
    layout = OnPaper(tp=2)
    layout.rank = 1
    part = shards.cut("w", whole, layout)
    assert part.tolist() == [[2.0], [4.0]]
    part.zero_()
    assert whole.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert region_of("w", whole, (2, 2), shards, layout).tolist() == [[1], [3]]
    assert region_of("v", whole, (2, 2), shards, layout).tolist() == [[0, 1], [2, 3]]


class Placed:
    """A DTensor without ranks."""

    device_mesh = "mesh"

    def __init__(self, *shape: int) -> None:
        self.shape, self.placements = torch.Size(shape), (Partial(), Shard(0))


def test_a_dtensor_is_cut_by_its_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribute(region: torch.Tensor, mesh: str, placements: object, src_data_rank: None) -> Any:
        assert (mesh, placements) == ("mesh", [Replicate(), Shard(0)])
        return SimpleNamespace(to_local=lambda: region[1:])

    monkeypatch.setattr(module, "DTensor", Placed)
    monkeypatch.setattr(module, "distribute_tensor", distribute)
    shards, layout = ShardMap({"w": Sharded("tp")}), OnPaper(tp=2)
    layout.rank = 1
    whole, further = (region_of("w", Placed(rows), (4,), shards, layout) for rows in (4, 2))  # type: ignore[arg-type]
    assert (whole.tolist(), further.tolist()) == ([1, 2, 3], [3])


class Scaled(nn.Module):
    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(3, rows)
        self.register_buffer("scale", torch.full((2,), float(seed)))
        self.register_buffer("table", torch.full((rows,), float(seed)))
        self.register_buffer(f"own{seed}", torch.full((2,), float(seed)))


def test_a_model_is_filled_with_its_parts_and_whole_buffers() -> None:
    unsharded, model, layout = Scaled(4, 1), Scaled(2, 2), OnPaper(tp=2)
    layout.rank = 1
    ShardMap({"up.*": Sharded("tp")}).write(model, unsharded, layout)
    assert model.up.weight.equal(unsharded.up.weight[2:])
    assert model.up.bias.equal(unsharded.up.bias[2:])
    assert [model.scale.tolist(), model.table.tolist(), model.own2.tolist()] == [
        [1.0] * 2,
        [2.0] * 2,
        [2.0] * 2,
    ]
    with pytest.raises(
        ValueError,
        match=r"\A`up.weight` has the shape \[2, 3\], its part \[4, 3\]: the shard map has another cut\Z",
    ):
        ShardMap().write(model, unsharded, layout)


def test_names_of_a_stage_are_those_of_the_unsharded_model() -> None:
    def rename(own: str, layout: Any) -> str:
        return own.replace("0", str(layout.at("tp")))

    layout = OnPaper(tp=2)
    layout.rank = 1
    shards = ShardMap(rename=rename)
    assert shards.name("0._orig_mod.weight", layout) == "1.weight"
    assert ShardMap().name("0._orig_mod.weight", layout) == "0.weight"
    unsharded, stage = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), nn.Sequential(nn.BatchNorm1d(1))
    unsharded[1].weight.data.fill_(5)
    unsharded[1].running_mean.fill_(7)
    shards.write(stage, unsharded, layout)
    assert (stage[0].weight.item(), stage[0].running_mean.item()) == (5.0, 7.0)
    unsharded.again = unsharded[0]
    last = nn.ModuleDict({"again": nn.Linear(1, 1)})
    ShardMap().write(last, unsharded, layout)
    assert last["again"].weight.equal(unsharded[0].weight)
    layout.rank = 0
    with pytest.raises(
        ValueError,
        match=r"\A`0.weight` is `9.weight` by the shard map, which the unsharded model does not have\Z",
    ):
        ShardMap(rename=lambda own, _: own.replace("0", "9")).write(stage, unsharded, layout)


@pytest.mark.parametrize(
    ("cut", "parts"),
    [
        (Sharded("tp"), [[0, 1, 2], [3, 4]]),
        (Sharded("tp", padded=True), [[0, 1, 2], [3, 4, -1]]),
        (Sharded("tp", parts=(2, 3)), [[0, 2, 3], [1, 4]]),
        (Sharded("tp", rows=lambda length, count, index: range(index, length, count)), [[0, 2, 4], [1, 3]]),
    ],
    ids=["chunks", "padded", "packed", "interleaved"],
)
def test_the_rows_of_a_part_are_what_the_cut_says(cut: Sharded, parts: list[list[int]]) -> None:
    assert [cut.indices(5, index, 2).tolist() for index in range(2)] == parts


def test_rows_of_padding_are_zero_in_a_part() -> None:
    shards, whole = ShardMap({"w": Sharded("tp", padded=True)}), torch.arange(1.0, 7.0).view(3, 2)
    parts = [shards.region("w", whole.shape, OnPaper(tp=2), rank) for rank in range(2)]
    assert parts[1].tolist() == [[4, 5], [-1, -1]]
    assert [take(whole, part).tolist() for part in parts] == [[[1, 2], [3, 4]], [[5, 6], [0, 0]]]


def test_buffers_of_one_shape_are_those_of_the_unsharded_model() -> None:
    whole, own = nn.Module(), nn.Module()
    for model, value in ((whole, 1.0), (own, 0.0)):
        model.register_buffer("mean", torch.full((3,), value))
        model.register_buffer("cache", torch.full((4 - int(value),), value))
    ShardMap().write(own, whole, OnPaper(tp=2))
    assert {name: each.tolist() for name, each in own.named_buffers()} == {
        "mean": [1.0] * 3,
        "cache": [0.0] * 4,
    }
