"""Ranks that call different things: an error at once, on every rank, that names both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.parametrize("backend", ["shm"]),
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated.*:FutureWarning"),
]


@dataclass(frozen=True)
class Pair:
    """The calls of two ranks, and the words that each error must have of both."""

    first: Callable[[dist.ProcessGroup], object]
    second: Callable[[dist.ProcessGroup], object]
    words: tuple[str, ...]


def ones(numel: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(numel, dtype=dtype)


PAIRS = {
    "operation": Pair(
        lambda g: dist.all_reduce(ones(), group=g),
        lambda g: dist.all_gather_into_tensor(ones(8), ones(), group=g),
        ("all_reduce", "all_gather"),
    ),
    "barrier": Pair(
        lambda g: dist.barrier(group=g),
        lambda g: dist.all_reduce(ones(), group=g),
        ("barrier", "all_reduce"),
    ),
    "dtype": Pair(
        lambda g: dist.all_reduce(ones(), group=g),
        lambda g: dist.all_reduce(ones(dtype=torch.bfloat16), group=g),
        ("float32", "bfloat16"),
    ),
    "dtype of the same size": Pair(
        lambda g: dist.all_gather_into_tensor(ones(8), ones(), group=g),
        lambda g: dist.all_gather_into_tensor(ones(8, torch.int32), ones(4, torch.int32), group=g),
        ("float32", "int32"),
    ),
    "size": Pair(
        lambda g: dist.all_reduce(ones(4), group=g),
        lambda g: dist.all_reduce(ones(5), group=g),
        ("4 float32", "5 float32"),
    ),
    "size of a broadcast": Pair(
        lambda g: dist.broadcast(ones(4), 0, group=g),
        lambda g: dist.broadcast(ones(5), 0, group=g),
        ("4 float32", "5 float32"),
    ),
    "root": Pair(
        lambda g: dist.broadcast(ones(), 0, group=g),
        lambda g: dist.broadcast(ones(), 1, group=g),
        ("root 0", "root 1"),
    ),
    "root of a gather": Pair(
        lambda g: dist.gather(ones(), [ones(), ones()], 0, group=g),
        lambda g: dist.gather(ones(), [ones(), ones()], 1, group=g),
        ("root 0", "root 1"),
    ),
    "reduce operation": Pair(
        lambda g: dist.all_reduce(ones(), dist.ReduceOp.SUM, group=g),
        lambda g: dist.all_reduce(ones(), dist.ReduceOp.MAX, group=g),
        ("SUM", "MAX"),
    ),
    "splits": Pair(
        lambda g: dist.all_to_all_single(ones(4), ones(4), [1, 3], [1, 3], group=g),
        lambda g: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 2], group=g),
        ("sends 3", "expects 2"),
    ),
    "list of sizes": Pair(
        lambda g: dist.all_gather([ones(2), ones(2)], ones(2), group=g),
        lambda g: dist.all_gather([ones(3), ones(3)], ones(3), group=g),
        ("2 float32", "3 float32"),
    ),
    "scatter": Pair(
        lambda g: dist.scatter(ones(2), [ones(2), ones(2)], 0, group=g),
        lambda g: dist.scatter(ones(3), None, 0, group=g),
        ("2 float32", "3 float32"),
    ),
    "reduce_scatter": Pair(
        lambda g: dist.reduce_scatter_tensor(ones(2), ones(4), group=g),
        lambda g: dist.reduce_scatter_tensor(ones(3), ones(6), group=g),
        ("2 float32", "3 float32"),
    ),
    "number of tensors": Pair(
        lambda g: dist.all_reduce_coalesced([ones(2), ones(2)], group=g),
        lambda g: dist.all_reduce_coalesced([ones(4)], group=g),
        ("2 tensors", "4 float32"),
    ),
    "one of many tensors": Pair(
        lambda g: dist.all_reduce_coalesced([ones(2)] * 41, group=g),
        lambda g: dist.all_reduce_coalesced([ones(2)] * 40 + [ones(3)], group=g),
        ("82 elements in many tensors float32", "83 elements in many tensors float32"),
    ),
    "order of many tensors": Pair(
        lambda g: dist.all_reduce_coalesced([ones(2)] * 40 + [ones(3)], group=g),
        lambda g: dist.all_reduce_coalesced([ones(3)] + [ones(2)] * 40, group=g),
        ("83 elements in many tensors float32",),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.ranks(2)
def test_both_ranks_learn_what_each_called(world, group, kind):
    pair = PAIRS[kind]
    with pytest.raises(dist.DistError) as error:
        (pair.second if world.rank else pair.first)(group)
    text = str(error.value)
    assert "rank 0" in text
    assert "rank 1" in text
    for word in pair.words:
        assert word in text


@pytest.mark.ranks(3)
def test_a_third_rank_learns_of_it(world, group):
    with pytest.raises(dist.DistError) as error:
        dist.all_reduce(ones(5 if world.rank == 2 else 4), group=group)
    assert "rank 2" in str(error.value)
    assert "5 float32" in str(error.value)


@pytest.mark.ranks(2)
def test_the_error_says_which_group_and_which_call(world, group):
    dist.barrier(group=group)
    dist.barrier(group=group)
    with pytest.raises(dist.DistError) as error:
        dist.all_reduce(ones(4 + world.rank), group=group)
    assert "#3" in str(error.value)
    assert str(group.group_name) in str(error.value)


@pytest.mark.ranks(2)
def test_an_asynchronous_mismatch_is_raised_by_the_wait(world, group):
    first = dist.all_reduce(ones(), group=group, async_op=True)
    second = dist.all_reduce(ones(4 + world.rank), group=group, async_op=True)
    first.wait()
    with pytest.raises(dist.DistError, match="5 float32"):
        second.wait()


@pytest.mark.ranks(2)
def test_a_mismatch_reaches_the_future(world, group):
    future = dist.all_reduce(ones(4 + world.rank), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="5 float32"):
        future.wait()


@pytest.mark.ranks(2)
def test_one_rank_calls_twice_the_other_not_at_all(world, group):
    # What one rank lacks is no mismatch, until the timeout: the text names who is missing.
    if world.rank == 0:
        dist.all_reduce(ones(), group=group, async_op=True)
        dist.barrier()
    else:
        dist.barrier()
        dist.all_reduce(ones(), group=group)
