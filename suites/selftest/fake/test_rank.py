"""Unit tests of fake worlds: what a collective has written of others, and whose values are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.exceptions import FakeValueError
from lockstep.features.fake import FakeRank
from lockstep.features.fake.rank import (
    READERS,
    FakeValues,
    _fill,
    _is_of,
    _is_whole,
    _masks,
    _of_others,
    _tensors,
    _written,
)

GROUP: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 3)


def places(name: str, written: Any) -> list[Any]:
    """Return what is of others in what a collective has written."""
    return [each.tolist() for each in _of_others(name, GROUP, written)]


@pytest.mark.parametrize("name", ["allgather_", "gather_"])
def test_a_rank_has_its_own_place_in_lists_that_it_gathers(name: str) -> None:
    lists = [[torch.tensor([place + ten]) for place in range(3)] for ten in (0, 10)]
    assert places(name, lists) == [[0], [2], [10], [12]]


@pytest.mark.parametrize("name", ["_allgather_base_", "all_gather_into_tensor", "all_gather_into_tensor_out"])
def test_a_rank_has_its_own_place_in_a_tensor_that_it_gathers(name: str) -> None:
    assert places(name, torch.arange(6)) == [[0, 1], [4, 5]]
    assert places(name, torch.arange(7)) == [[*range(7)]]


def test_all_else_that_a_collective_writes_is_of_others() -> None:
    assert places("allreduce_", [torch.arange(3), [torch.tensor(7)]]) == [[0, 1, 2], 7]
    assert places("_allgather_base_", []) == []


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int8, -128), (torch.uint8, 255), (torch.int32, -(2**31)), (torch.bool, True)],
)
def test_a_value_that_no_peer_has_sent_is_the_extreme_of_its_dtype(dtype: torch.dtype, value: int) -> None:
    tensor = torch.ones(2, dtype=dtype)
    if dtype == torch.bool:
        tensor.zero_()
    _fill(tensor)
    assert tensor.tolist() == [value, value]
    for dtype_of_nan in (torch.float32, torch.complex64):
        tensor = torch.ones(2, dtype=dtype_of_nan, requires_grad=True)
        _fill(tensor)
        assert tensor.isnan().all()


def test_tensors_are_found_in_nested_lists_and_masks_among_indices() -> None:
    one, two, three = torch.tensor([1]), torch.tensor([True]), torch.tensor([3], dtype=torch.uint8)
    assert [*map(id, _tensors([one, (two, [three]), None, "x", {"key": one}]))] == [
        id(one),
        id(two),
        id(three),
    ]
    assert [*map(id, _masks([one, None, two, three]))] == [id(two), id(three)]


def test_arguments_that_an_operation_writes_are_found_by_place_and_by_name() -> None:
    out, other = torch.zeros(2), torch.ones(2)
    add: Any = torch.ops.aten.add
    assert [*map(id, _written(add.out, (other, other), {"out": out}))] == [id(out)]
    assert [*map(id, _written(torch.ops.aten.add_.Tensor, (out, other), {}))] == [id(out)]
    assert [*_written(add.Tensor, (other, other), {})] == []


def test_a_tensor_is_whole_if_it_has_all_of_its_memory() -> None:
    whole = torch.zeros(4, 2)
    assert [_is_whole(each) for each in (whole, whole.t(), whole[1:], whole[:, 0])] == [
        True,
        True,
        False,
        False,
    ]


def test_a_module_is_of_its_package_and_not_of_one_with_a_longer_name() -> None:
    names = ["torch.optim", "torch.optim.adam", "torch.optimal", "torch", "lockstep.engine.x", "tests"]
    assert [_is_of(name, READERS) for name in names] == [True, True, False, False, True, False]


@pytest.fixture
def values() -> FakeValues:
    return FakeValues(FakeRank(1, 3, False), "/base")


def test_the_first_source_of_a_value_is_kept_until_another_writes_it(values: FakeValues) -> None:
    one, two = torch.zeros(2), torch.zeros(2)
    values._mark((one, two[:1]), "all_reduce at a.py:1")
    assert values._source((3, [one])) == values._source((two,)) == "all_reduce at a.py:1"
    assert values._source((torch.zeros(2), "x")) is None
    values._mark((two,), "broadcast at a.py:2")
    assert values._source((two, one)) == "broadcast at a.py:2"


def test_sources_of_tensors_that_are_gone_are_forgotten_now_and_then(values: FakeValues) -> None:
    kept = [torch.zeros(1) for _ in range(600)]
    values._mark(kept, "x")
    gone: list[Tensor] = [torch.zeros(1) for _ in range(424)]
    values._mark(gone, "x")
    gone.clear()
    assert (len(values._sources), values._sweep_at) == (1024, 1024)
    values._mark((last := torch.zeros(1),), "y")
    assert (len(values._sources), values._sweep_at) == (601, 1202)
    assert values._source((last,)) == "y"
    values._sweep_at = 2
    values._sources = dict([*values._sources.items()][:2])
    values._mark((last,), "y")
    assert values._sweep_at == 1024


def test_a_value_of_a_peer_is_refused_to_a_test_and_methods_come_back(values: FakeValues) -> None:
    value, before = torch.zeros(2), (Tensor.tolist, Tensor.numpy)
    with values:
        values._mark((value,), "all_reduce at a.py:1")
        with pytest.raises(FakeValueError) as caught:
            value.tolist()
        assert torch.zeros(2).tolist() == [0.0, 0.0]
    assert str(caught.value) == (
        "this value comes from all_reduce at a.py:1, which received nothing: the test runs as rank 1 of 3 in "
        "a fake world, where no other rank exists. Claim shapes, bytes or counts instead, or run on real "
        "ranks; "
        "ranks(..., backend='fake', made_up_values=True) shows what torch's fake group makes up"
    )
    assert (Tensor.tolist, Tensor.numpy) == before
    assert values._sources == {}
    assert value.tolist() == [0.0, 0.0]
