"""Many DTensors in full: they are what `full_tensor` returns, by one gather for those that are alike."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lockstep.assertions.full_tensors import full_tensors
from lockstep.recorders import CollectivesLog

SHAPES = [(5, 3), (1,), (0, 2), (7,), (3, 1, 4)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape).to(dtype)


def check(tensors: dict[str, Any], gathers: int) -> None:
    """Compare them with what `full_tensor` returns, and count the collectives."""
    with CollectivesLog() as log:
        found = full_tensors(tensors)
    expected = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert type(found[name]) is type(tensor)
        assert tensor is found[name] is None or (
            torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        )
    assert sum(log.counts().values()) == gathers


@pytest.mark.ranks(2, 3)
def test_dtensors_of_any_shape_are_whole(world: Any) -> None:
    mesh = world.mesh(world.size)
    tensors: dict[str, Any] = {"plain": numbers(2), "none": None}
    for shape in SHAPES:
        for dim in range(len(shape)):
            tensors[f"{shape} {dim}"] = distribute_tensor(numbers(*shape), mesh, [Shard(dim)])
    tensors["replicated"] = distribute_tensor(numbers(), mesh, [Replicate()])
    check(tensors, gathers=1)
    half = distribute_tensor(numbers(5, dtype=torch.float16), mesh, [Shard(0)])
    check({"half": half, **tensors}, gathers=2)


@pytest.mark.ranks(1)
def test_one_rank_has_them_and_sends_nothing(world: Any) -> None:
    check({"": distribute_tensor(numbers(3), world.mesh(1), [Shard(0)])}, gathers=0)


@pytest.mark.ranks(2)
def test_without_elements_nothing_is_sent(world: Any) -> None:
    check({"": distribute_tensor(numbers(0, 3), world.mesh(2), [Shard(0)])}, gathers=0)


@pytest.mark.ranks(2)
def test_gradients_of_what_is_sharded_stay_out_of_the_result(world: Any) -> None:
    sharded = distribute_tensor(numbers(4), world.mesh(2), [Shard(0)]).requires_grad_()
    assert not full_tensors({"": sharded})[""].requires_grad


@pytest.mark.ranks(4)
def test_on_two_axes_one_of_them_may_shard(world: Any) -> None:
    mesh = world.mesh(2, 2, names=("replicate", "shard"))
    inner = {
        str(shape): distribute_tensor(numbers(*shape), mesh, [Replicate(), Shard(0)]) for shape in SHAPES
    }
    check(inner, gathers=1)
    outer = distribute_tensor(numbers(5, 3), mesh, [Shard(1), Replicate()])
    check({**inner, "outer": outer}, gathers=2)


@pytest.mark.ranks(4)
def test_what_is_divided_twice_or_not_summed_torch_makes_whole(world: Any) -> None:
    mesh = world.mesh(2, 2, names=("first", "second"))
    twice = distribute_tensor(numbers(8), mesh, [Shard(0), Shard(0)])
    parts = DTensor.from_local(numbers(3), mesh, [Partial(), Replicate()])
    assert full_tensors({"twice": twice})["twice"].tolist() == numbers(8).tolist()
    assert full_tensors({"parts": parts})["parts"].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.ranks(2)
def test_many_bytes_go_by_several_gathers(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lockstep.assertions.full_tensors"], "_MOST_BYTES", 64)
    mesh = world.mesh(2)
    check({str(i): distribute_tensor(numbers(8) + i, mesh, [Shard(0)]) for i in range(5)}, gathers=3)
