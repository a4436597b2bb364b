"""send, recv, isend, irecv and batches of them: tags, any source, order."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.shm import OutOfSharedMemory
from suites.selftest.shm.samples import same, sample

only_shm = pytest.mark.parametrize("backend", ["shm"])


@pytest.mark.ranks(2)
def test_messages_of_one_tag_arrive_in_order(world, group):
    for turn in range(10):
        if world.rank == 0:
            dist.send(torch.full((3,), float(turn)), 1, group=group)
        else:
            dist.recv(tensor := torch.empty(3), 0, group=group)
            assert tensor.tolist() == [float(turn)] * 3


@pytest.mark.ranks(2)
def test_tags_are_received_in_another_order(world, group):
    if world.rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, group=group, tag=tag) for tag in (5, 6, 7)]
    else:
        got = [torch.empty(2) for _ in range(3)]
        works = [dist.irecv(got[tag - 5], 0, group=group, tag=tag) for tag in (7, 5, 6)]
    for work in works:
        work.wait()
    if world.rank == 1:
        assert [tensor.tolist() for tensor in got] == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]


@pytest.mark.ranks(3)
def test_any_source_says_who_sent(world, group):
    if world.rank == 0:
        got = {}
        for _ in range(2):
            tensor = torch.empty(6)
            got[dist.recv(tensor, group=group)] = tensor
        assert sorted(got) == [1, 2]
        assert all(same(tensor, sample(source)) for source, tensor in got.items())
    else:
        dist.send(sample(world.rank), 0, group=group)


@pytest.mark.ranks(2)
def test_any_source_with_a_tag(world, group):
    if world.rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, group=group, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    else:
        for tag in (2, 1):
            dist.recv(tensor := torch.empty(1), group=group, tag=tag)
            assert tensor.item() == tag


@pytest.mark.ranks(2)
def test_both_send_before_they_receive(world, group):
    other = 1 - world.rank
    work = dist.isend(sample(world.rank, numel=100_000), other, group=group)
    dist.recv(tensor := torch.empty(100_000), other, group=group)
    work.wait()
    assert same(tensor, sample(other, numel=100_000))


@pytest.mark.parametrize("first", ["isend", "irecv"])
@pytest.mark.ranks(2)
def test_a_batch_in_either_order(world, group, first):
    other = 1 - world.rank
    got = torch.empty(6)
    batch = [
        dist.P2POp(dist.isend, sample(world.rank), other, group),
        dist.P2POp(dist.irecv, got, other, group),
    ]
    for work in dist.batch_isend_irecv(batch if first == "isend" else batch[::-1]):
        work.wait()
    assert same(got, sample(other))


@pytest.mark.ranks(3)
def test_a_ring_of_batches(world, group):
    value = sample(world.rank)
    for _ in range(3):
        got = torch.empty(6)
        batch = [
            dist.P2POp(dist.isend, value, (world.rank + 1) % 3, group),
            dist.P2POp(dist.irecv, got, (world.rank - 1) % 3, group),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        value = got
    assert same(value, sample(world.rank))


@pytest.mark.ranks(2)
def test_messages_and_collectives_do_not_disturb_each_other(world, group):
    if world.rank == 0:
        work = dist.isend(sample(0), 1, group=group)
    else:
        work = dist.irecv(got := torch.empty(6), 0, group=group)
    dist.all_reduce(tensor := torch.ones(1), group=group)
    work.wait()
    assert tensor.item() == 2
    assert world.rank == 0 or same(got, sample(0))


@only_shm
@pytest.mark.ranks(2)
def test_a_receive_is_started_before_the_send(world, group):
    if world.rank == 1:
        works = [dist.irecv(tensor := torch.empty(6), 0, group=group)]
        dist.barrier(group=group)
        works[0].wait()
        assert same(tensor, sample(0))
    else:
        dist.barrier(group=group)
        dist.send(sample(0), 1, group=group)


@only_shm
@pytest.mark.ranks(2)
def test_tensors_that_are_not_contiguous(world, group):
    if world.rank == 0:
        dist.send(sample(0).view(2, 3).T, 1, group=group)
    else:
        dist.recv(tensor := torch.empty(2, 3).T, 0, group=group)
        assert same(tensor, sample(0).view(2, 3).T)


@pytest.mark.ranks(2)
def test_messages_without_elements(world, group):
    if world.rank == 0:
        dist.send(torch.empty(0), 1, group=group)
        dist.send(torch.ones(1), 1, group=group)
    else:
        dist.recv(torch.empty(0), 0, group=group)
        dist.recv(one := torch.empty(1), 0, group=group)
        assert one.item() == 1


@only_shm
@pytest.mark.ranks(2)
def test_a_message_of_another_size_is_an_error_of_both(world, group):
    call = dist.send if world.rank == 0 else dist.recv
    with pytest.raises(dist.DistError) as error:
        call(torch.ones(3 + world.rank), 1 - world.rank, group=group)
    text = str(error.value)
    assert "rank 0" in text
    assert "rank 1" in text
    assert "3 float32" in text
    assert "4 float32" in text


@only_shm
@pytest.mark.ranks(2)
def test_a_message_of_another_dtype_is_an_error_of_both(world, group):
    call, dtype = ((dist.send, torch.float32), (dist.recv, torch.int64))[world.rank]
    with pytest.raises(dist.DistError, match="int64"):
        call(torch.ones(3, dtype=dtype), 1 - world.rank, group=group)


@only_shm
@pytest.mark.ranks(2)
def test_a_message_to_oneself_is_refused(world, group):
    with pytest.raises((ValueError, RuntimeError), match=r"rank|itself"):
        dist.send(torch.ones(3), world.rank, group=group)


@only_shm
@pytest.mark.ranks(2)
def test_a_hundred_messages_before_the_first_receive(world, group):
    if world.rank == 0:
        works = [dist.isend(torch.full((3000,), float(turn)), 1, group=group) for turn in range(100)]
        dist.barrier(group=group)
        for work in works:
            work.wait()
    else:
        dist.barrier(group=group)
        for turn in range(100):
            dist.recv(tensor := torch.empty(3000), 0, group=group)
            assert tensor.min() == tensor.max() == turn


@only_shm
@pytest.mark.ranks(2)
def test_the_last_tag_of_a_hundred_is_received_first(world, group):
    if world.rank == 0:
        works = [dist.isend(torch.full((2,), float(tag)), 1, group=group, tag=tag) for tag in range(100)]
        for work in works:
            work.wait()
    else:
        for tag in reversed(range(100)):
            dist.recv(tensor := torch.empty(2), 0, group=group, tag=tag)
            assert tensor.tolist() == [float(tag)] * 2


@only_shm
@pytest.mark.ranks(2)
def test_receives_take_messages_in_the_order_of_the_calls(world, group):
    if world.rank == 0:
        for turn in range(3):
            dist.send(torch.full((1,), float(turn)), 1, group=group)
    else:
        got = [torch.empty(1) for _ in range(3)]
        works = [dist.irecv(tensor, 0, group=group) for tensor in got]
        for work in reversed(works):
            work.wait()
        assert [tensor.item() for tensor in got] == [0.0, 1.0, 2.0]


@only_shm
@pytest.mark.ranks(2)
def test_a_message_arrives_while_its_receiver_waits_elsewhere(world, group):
    got = torch.empty(100_000)
    if world.rank == 1:
        receive = dist.irecv(got, 0, group=group)
        dist.barrier(group=group)  # which rank 0 reaches when its message has been taken
        receive.wait()
        assert got.min() == got.max() == 5
    else:
        dist.send(torch.full((100_000,), 5.0), 1, group=group)
        dist.barrier(group=group)


@pytest.mark.ranks(3)
def test_any_source_goes_on_after_one_sender_has_left(world):
    group = dist.new_group(backend="shm")
    if world.rank == 0:
        sources = [dist.recv(torch.empty(1), group=group)]
        world.barrier()
        sources.append(dist.recv(torch.empty(1), group=group))
        assert sources == [2, 1]
    elif world.rank == 2:
        dist.send(torch.ones(1), 0, group=group)
        dist.destroy_process_group(group)
        world.barrier()
    else:
        world.barrier()
        dist.send(torch.ones(1), 0, group=group)
    world.barrier()
    if world.rank != 2:
        dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(2)
def test_a_future_of_a_receive(world, group):
    if world.rank == 0:
        dist.barrier(group=group)
        dist.send(torch.full((2,), 3.0), 1, group=group)
    else:
        future = dist.irecv(torch.empty(2), 0, group=group).get_future()
        dist.barrier(group=group)
        assert future.wait()[0].tolist() == [3.0, 3.0]


@pytest.mark.ranks(2)
def test_a_receive_times_out_and_says_of_whom(world):
    group = dist.new_group(backend="shm", timeout=timedelta(seconds=0.2))
    if world.rank == 0:
        with pytest.raises(dist.DistError, match=r"recv of 3 float32.* from rank 1 of group .* timed out"):
            dist.recv(torch.empty(3), 1, group=group)
    world.barrier()
    dist.destroy_process_group(group)


@only_shm
@pytest.mark.ranks(2)
def test_a_message_without_memory_for_it_fails_on_both_ranks(world, group, monkeypatch):
    def take(nbytes, why):
        raise OutOfSharedMemory(f"{why}: no memory today")

    if world.rank == 0:
        monkeypatch.setattr(group._channel.arena, "take", take)
    call = dist.send if world.rank == 0 else dist.recv
    with pytest.raises(dist.DistError, match=r"send of 100000 float32.*no memory today"):
        call(torch.empty(100_000), 1 - world.rank, group=group)
    monkeypatch.undo()
    call(torch.empty(100_000), 1 - world.rank, group=group)
