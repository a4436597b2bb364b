"""Calls that a group refuses, by one sentence: wrong tensors, devices, roots, and calls after its end."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

pytestmark = [
    pytest.mark.parametrize("backend", ["shm"]),
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]


def options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    chosen = dist.AllreduceOptions()
    chosen.reduceOp = op
    return chosen


WRONG = {
    "output of all_gather_into_tensor": (
        lambda g: dist.all_gather_into_tensor(torch.empty(7), torch.ones(4), group=g),
        "7 elements is not 2 times one of 4",
    ),
    "output of reduce_scatter_tensor": (
        lambda g: dist.reduce_scatter_tensor(torch.empty(3), torch.ones(4), group=g),
        "4 elements is not 2 times one of 3",
    ),
    "own size in all_gather": (
        lambda g: dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(2), group=g),
        "all_gather: an output of 4 elements, for an input of 2",
    ),
    "conjugated view": (
        lambda g: dist.broadcast(torch.ones(4, dtype=torch.complex64).conj(), 0, group=g),
        r"\.resolve_conj\(\)",
    ),
    "negated view": (
        lambda g: dist.broadcast(torch.ones(1, dtype=torch.complex64).conj().imag, 0, group=g),
        r"broadcast: .*\.resolve_neg\(\)",
    ),
    "length of a list": (
        lambda g: dist.all_gather([torch.empty(4)], torch.ones(4), group=g),
        "1.*2|2.*1",
    ),
    "splits that do not add up": (
        lambda g: dist.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1], [2, 2], group=g),
        "split",
    ),
    "number of splits": (
        lambda g: dist.all_to_all_single(torch.empty(4), torch.ones(4), [4], [2, 2], group=g),
        "split",
    ),
    "rows that cannot be split": (
        lambda g: dist.all_to_all_single(torch.empty(3), torch.ones(3), group=g),
        "3",
    ),
    "root of broadcast": (lambda g: dist.broadcast(torch.ones(4), group=g, group_src=9), "root 9"),
    "root of reduce": (lambda g: dist.reduce(torch.ones(4), group=g, group_dst=9), "root 9"),
    "root of gather": (lambda g: dist.gather(torch.ones(4), group=g, group_dst=9), "root 9"),
    "root of scatter": (lambda g: dist.scatter(torch.ones(4), group=g, group_src=9), "root 9"),
    "meta": (lambda g: dist.all_reduce(torch.ones(4, device="meta"), group=g), "meta"),
    "sparse": (lambda g: dist.all_reduce(torch.eye(3).to_sparse(), group=g), "(?i)sparse"),
    "bitwise operation of floats": (
        lambda g: dist.all_reduce(torch.ones(4), dist.ReduceOp.BAND, group=g),
        "BAND.*float32",
    ),
    "extreme of complex numbers": (
        lambda g: g.allreduce([torch.ones(4, dtype=torch.complex64)], options(dist.ReduceOp.MAX)),
        "all_reduce: MAX has no meaning for torch.complex64",
    ),
    "mean of bool": (
        lambda g: dist.all_reduce(torch.ones(4, dtype=torch.bool), dist.ReduceOp.AVG, group=g),
        "all_reduce: AVG needs numbers, not torch.bool",
    ),
    "output of another dtype": (
        lambda g: g.all_gather_single(torch.empty(8, dtype=torch.int32), torch.ones(4)),
        "all_gather_single: its tensors have different dtypes, torch.float32 and torch.int32",
    ),
    "rank of send": (
        lambda g: g.send([torch.ones(4)], 2),
        "cannot send to rank 2 of group .*: it has 2",
    ),
    "message to oneself": (
        lambda g: g.recv([torch.ones(4)], g.rank()),
        r"rank \d of group .* cannot receive from itself",
    ),
    "sum of float8": (
        lambda g: dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn), group=g),
        "float8_e4m3fn",
    ),
    "output that overlaps itself": (
        lambda g: dist.all_reduce(torch.ones(1).expand(4), group=g),
        "expanded",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.ranks(2)
def test_refused_before_it_is_sent(world, group, kind):
    call, pattern = WRONG[kind]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=pattern):
        call(group)
    dist.all_reduce(tensor := torch.ones(1), group=group)  # nothing was sent
    assert tensor.item() == 2


@pytest.mark.ranks(2)
def test_a_call_after_the_end_of_the_group(world, group):
    other = dist.new_group(backend="shm")
    dist.barrier(group=other)
    dist.destroy_process_group(other)
    with pytest.raises((dist.DistError, ValueError), match="has left group"):
        other.allreduce([torch.ones(1)])


@pytest.mark.ranks(2)
def test_abort_ends_a_wait_of_the_same_rank(world, group):
    other = dist.new_group(backend="shm")
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=other, async_op=True)
        other.abort()
        with pytest.raises(dist.DistError, match="abort"):
            work.wait()
    dist.barrier()
    dist.destroy_process_group(other)


@pytest.mark.ranks(2)
def test_abort_frees_ranks_that_wait(world, group):
    other = dist.new_group(backend="shm")
    if world.rank == 0:
        with pytest.raises(dist.DistError, match=r"rank 1.*abort"):
            dist.all_reduce(torch.ones(1), group=other)
    else:
        other.abort()
    dist.barrier()
    dist.destroy_process_group(other)


@pytest.mark.ranks(2)
def test_a_rank_that_ended_its_group_is_named(world, group):
    other = dist.new_group(backend="shm")
    if world.rank == 0:
        with pytest.raises(dist.DistError, match="rank 1"):
            dist.all_reduce(torch.ones(1), group=other)
        dist.destroy_process_group(other)
    else:
        dist.destroy_process_group(other)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_sender_may_end_its_group_before_others_have_read(world, group):
    other = dist.new_group(backend="shm")
    tensor = torch.full((100_000,), 7.0 if world.rank == 0 else 0.0)
    dist.broadcast(tensor, 0, group=other)
    dist.destroy_process_group(other)
    assert tensor.min() == tensor.max() == 7
