"""Asynchronous collectives used too early, and used well; run with `--skew`."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import lockstep.shm  # noqa: F401

BACKENDS = [pytest.param(name, marks=pytest.mark.ranks(2, backend=name)) for name in ("gloo", "shm")]
on_each = pytest.mark.parametrize("backend", BACKENDS)


@on_each
def test_output_read_early(world, backend):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.sum()
    work.wait()


@on_each
@pytest.mark.skew(seeds=[])
def test_output_read_early_on_purpose(world, backend):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    tensor.max()
    work.wait()
    assert tensor.tolist() == [2, 2, 2]


@on_each
def test_output_read_where_torch_does_not_see_it(world, backend):
    tensor = torch.ones(3)
    view = tensor.numpy()
    work = dist.all_reduce(tensor, async_op=True)
    early = view.tolist()
    work.wait()
    assert all(value != value for value in early), early
    assert view.tolist() == [2, 2, 2]


@on_each
def test_input_overwritten_early(world, backend):
    sent, received = torch.ones(3), torch.empty(6)
    work = dist.all_to_all_single(received, sent.repeat(2), async_op=True)
    work.wait()
    pieces = [torch.empty(3), torch.empty(3)]
    work = dist.all_gather(pieces, sent, async_op=True)
    sent.zero_()
    work.wait()


@on_each
def test_input_overwritten_where_torch_does_not_see_it(world, backend):
    sent, pieces = torch.ones(3), [torch.empty(3), torch.empty(3)]
    work = dist.all_gather(pieces, sent, async_op=True)
    sent.numpy()[1] = 5
    work.wait()


@on_each
def test_output_written_early(world, backend):
    tensor = torch.ones(3, dtype=torch.int64)
    work = dist.broadcast(tensor, 0, async_op=True)
    if world.rank == 1:
        tensor.numpy()[1] = 5
    work.wait()


@on_each
def test_memory_freed_early(world, backend):
    sent, pieces = torch.ones(3), [torch.empty(3), torch.empty(3)]
    work = dist.all_gather(pieces, sent, async_op=True)
    sent.untyped_storage().resize_(0)
    work.wait()


@on_each
def test_collectives_that_are_waited_for(world, backend):
    mine = torch.tensor([world.rank + 1.0])
    pieces = [torch.empty(1), torch.empty(1)]
    dist.all_gather(pieces, mine, async_op=True).get_future().wait()
    assert [piece.item() for piece in pieces] == [1, 2]
    dist.all_gather(pieces, mine)
    assert [piece.item() for piece in pieces] == [1, 2]
    received = torch.zeros(2)
    dist.all_to_all_single(received, mine.repeat(2), async_op=True).wait()
    assert received.tolist() == [1, 2]
    dist.reduce_scatter(mine, [torch.tensor([1.0]), torch.tensor([2.0])], async_op=True).wait()
    assert mine.item() == 2 * (world.rank + 1)
    for root in (0, 1):
        value = torch.tensor([world.rank], dtype=torch.uint8)
        dist.broadcast(value, root, async_op=True).wait()
        assert value.item() == root
        total = torch.tensor([world.rank + 1])
        dist.reduce(total, root, async_op=True).wait()
        assert world.rank != root or total.item() == 3
        listed = [torch.empty(1), torch.empty(1)] if world.rank == root else None
        dist.gather(mine, listed, root, async_op=True).wait()
        assert listed is None or [each.item() for each in listed] == [2, 4]
        one = torch.empty(1)
        dist.scatter(one, [mine, mine + 1] if world.rank == root else None, root, async_op=True).wait()
        assert one.item() == 2 * (root + 1) + world.rank
    there = torch.zeros(1)
    works = [dist.isend(mine, 1 - world.rank), dist.irecv(there, 1 - world.rank)]
    for work in works:
        work.wait()
    assert there.item() == 2 * (2 - world.rank)
    assert functional.all_reduce(mine, "sum", dist.group.WORLD).tolist() == [6]
    assert world.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
    world.barrier()


@on_each
def test_ddp(world, backend):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5, 1.5, 1.5]]


@pytest.mark.ranks(2)
def test_fsdp2(world):
    model = nn.Linear(3, 2)
    fully_shard(model)
    model(torch.full((1, 3), world.rank + 1.0)).sum().backward()
    assert model.weight.grad.full_tensor()[0].tolist() == [1.5, 1.5, 1.5]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("error")
def test_dtensor_while_a_collective_is_in_flight(world):
    rows = distribute_tensor(torch.tensor([[0.0, 2.0], [1.0, 5.0]]), world.mesh(2), [Shard(0)])
    value = torch.ones(3)
    work = dist.all_reduce(value, async_op=True)
    normed = nn.functional.layer_norm(rows, [2])  # of a shape that DTensor has not seen
    work.wait()
    torch.testing.assert_close(normed.full_tensor(), torch.tensor([[-1.0, 1.0], [-1.0, 1.0]]))
    assert value.tolist() == [2, 2, 2]
