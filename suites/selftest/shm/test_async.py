"""Work objects: several in flight, waited for in any order, from several threads, and their futures."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from suites.selftest.shm.samples import same, sample

pytestmark = [
    # torch 2.13 gave three collectives new names, torch 2.11 does not have those yet.
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
]

only_shm = pytest.mark.parametrize("backend", ["shm"])


def start_some(group, rank):
    """Start one collective of each kind; return the works and what each must have filled."""
    both = [sample(0), sample(1)]
    summed, gathered, scattered, sent = sample(rank), torch.empty(12), torch.empty(3), sample(rank)
    exchanged = torch.empty(6)
    works = [
        dist.all_reduce(summed, group=group, async_op=True),
        dist.all_gather_into_tensor(gathered, sample(rank), group=group, async_op=True),
        dist.reduce_scatter_tensor(scattered, sample(rank), group=group, async_op=True),
        dist.broadcast(sent, 1, group=group, async_op=True),
        dist.all_to_all_single(exchanged, sample(rank), group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    expected = [
        (summed, sum(both)),
        (gathered, torch.cat(both)),
        (scattered, sum(both).view(2, 3)[rank]),
        (sent, both[1]),
        (exchanged, torch.cat([piece.view(2, 3)[rank] for piece in both])),
    ]
    return works, expected


@pytest.mark.ranks(2)
def test_works_are_waited_for_in_another_order_on_each_rank(world, group):
    for turn, order in enumerate(itertools.islice(itertools.permutations(range(6)), 0, 720, 60)):
        works, expected = start_some(group, world.rank)
        for index in order if (turn + world.rank) % 2 else reversed(order):
            works[index].wait()
        for got, value in expected:
            assert same(got, value)


@pytest.mark.ranks(2)
def test_a_synchronous_call_while_others_are_in_flight(world, group):
    works, expected = start_some(group, world.rank)
    dist.all_reduce(tensor := sample(world.rank), group=group)
    assert same(tensor, sample(0) + sample(1))
    for work in works:
        work.wait()
    for got, value in expected:
        assert same(got, value)


@pytest.mark.ranks(2)
def test_a_work_says_when_it_is_complete(world, group):
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    assert isinstance(work, dist.Work)
    assert work.wait() is True
    assert work.is_completed()
    assert work.wait() is True  # a second time


@only_shm
@pytest.mark.ranks(2)
def test_a_work_completes_without_a_wait(world, group):
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.barrier()  # of the default group: every rank has called
    while not work.is_completed():
        pass
    assert work.is_success()
    assert tensor.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_works_without_a_wait_do_no_harm(world, group):
    for _ in range(20):
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.broadcast(torch.ones(3), 0, group=group, async_op=True)
    dist.all_reduce(tensor := torch.ones(1), group=group)
    assert tensor.item() == 2


@only_shm
@pytest.mark.ranks(2)
def test_a_completed_work_is_freed(world, group):
    work = dist.all_reduce(tensor := torch.ones(3), group=group, async_op=True)
    work.wait()
    kept = [weakref.ref(work), weakref.ref(tensor)]
    del work, tensor
    dist.barrier(group=group)
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


@only_shm
@pytest.mark.ranks(2)
def test_the_input_may_be_overwritten_once_the_wait_returned(world, group):
    mine, output = sample(world.rank), torch.empty(12)
    for turn in range(10):
        dist.all_gather_into_tensor(output, mine, group=group, async_op=True).wait()
        mine += 1
        assert same(output, torch.cat([sample(0), sample(1)]) + turn)


@pytest.mark.ranks(2)
def test_a_future_has_the_result(world, group):
    tensor = sample(world.rank)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    future.wait()
    assert future.done()
    (value,) = future.value()
    assert same(value, sample(0) + sample(1))
    assert same(tensor, sample(0) + sample(1))


@pytest.mark.ranks(2)
def test_callbacks_of_futures_run_without_a_wait(world, group):
    called = threading.Event()
    tensor = torch.ones(2)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    chained = future.then(lambda done: called.set() or done.value()[0] / 2)
    assert called.wait(20)
    assert chained.wait().tolist() == [1.0, 1.0]


@only_shm
@pytest.mark.ranks(2)
def test_futures_complete_in_any_order(world, group):
    tensors = [torch.full((2,), float(turn)) for turn in range(8)]
    futures = [dist.all_reduce(t, group=group, async_op=True).get_future() for t in tensors]
    for future in futures if world.rank else reversed(futures):
        future.wait()
    assert [tensor.tolist() for tensor in tensors] == [[2.0 * turn] * 2 for turn in range(8)]


@only_shm
@pytest.mark.ranks(2)
def test_a_future_and_a_wait_may_be_mixed(world, group):
    first = dist.all_reduce(a := torch.ones(2), group=group, async_op=True)
    second = dist.all_reduce(b := torch.ones(2), group=group, async_op=True)
    future = first.get_future()
    second.wait()
    first.wait()
    future.wait()
    assert a.tolist() == b.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
def test_threads_on_groups_of_their_own(world):
    groups = [dist.new_group(backend="shm") for _ in range(3)]
    results: list[float] = []

    def run(group):
        for _ in range(50):
            dist.all_reduce(tensor := torch.ones(4), group=group)
            results.append(tensor.sum().item())

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [8.0] * 150
    for group in groups:
        dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(2)
def test_works_are_waited_for_in_another_thread(world, group):
    tensors = [torch.ones(4) for _ in range(10)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tensor.tolist() == [2.0] * 4 for tensor in tensors)


@only_shm
@pytest.mark.ranks(2)
def test_a_wait_with_a_timeout_of_its_own(world, group):
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        with pytest.raises(dist.DistError, match=r"rank 1.*all_reduce|all_reduce.*rank 1"):
            work.wait(timedelta(milliseconds=50))
    dist.barrier()


@only_shm
@pytest.mark.parametrize("async_ops", [False, True])
@pytest.mark.ranks(2)
def test_the_coalescing_manager(world, group, async_ops):
    tensors = [torch.full((n,), world.rank + 1.0) for n in (1, 2, 3)]
    with _coalescing_manager(group, async_ops=async_ops) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    if async_ops:
        manager.wait()
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * n for n in (1, 2, 3)]
    outputs = [torch.empty(2), torch.empty(4)]
    with _coalescing_manager(group, async_ops=async_ops) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(
                output, output.new_full((output.numel() // 2,), world.rank), group=group
            )
    if async_ops:
        manager.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [0.0, 0.0, 1.0, 1.0]]
    outputs = [torch.empty(1), torch.empty(2)]
    with _coalescing_manager(group, async_ops=async_ops) as manager:
        for output in outputs:
            dist.reduce_scatter_tensor(output, torch.arange(2.0 * output.numel()), group=group)
    if async_ops:
        manager.wait()
    assert outputs[0].tolist() == [2.0 * world.rank]
    assert outputs[1].tolist() == [4.0 * world.rank, 4.0 * world.rank + 2]


@only_shm
@pytest.mark.ranks(2)
def test_the_coalescing_manager_of_a_device(world, group):
    tensors = [torch.ones(1), torch.ones(2)]
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(tensors[0], group=group, async_op=True)
        dist.broadcast(tensors[1], 0, group=group, async_op=True)
    manager.wait()
    assert tensors[0].item() == 2
