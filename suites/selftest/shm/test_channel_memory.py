"""The memory of a channel: used again, lent, read by peers and mapped by them."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
import torch

from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import OutOfSharedMemory, PeerLost, ShmError
from lockstep.shm.memory import WHAT_TO_RAISE, Segment
from lockstep.shm.operation import Operation
from lockstep.shm.peer import INLINE
from suites.selftest.shm.ends import meet_all


def test_memory_is_used_again(pair: list[Collectives]) -> None:
    for _ in range(20):
        for operation in [end.all_reduce(torch.ones(1 << 16), 0) for end in pair]:
            operation.complete()
    assert [end.channel.arena.nbytes for end in pair] == [1 << 18, 1 << 18]


def test_what_lies_in_allocated_memory_is_not_copied(pair: list[Collectives]) -> None:
    numel = 1 << 16
    buffer = pair[0].channel.allocate(2 * numel, torch.float32)
    buffer.copy_(torch.arange(2.0 * numel))
    shards = [torch.zeros(numel), torch.zeros(numel)]
    begun = [
        end.reduce_scatter_single(shard, whole, 0)
        for end, shard, whole in zip(pair, shards, (buffer, torch.ones(2 * numel)), strict=True)
    ]
    for operation in begun:
        operation.complete()
    assert torch.cat(shards).equal(torch.arange(2.0 * numel) + 1)
    assert [end.channel.arena.nbytes for end in pair] == [8 * numel, 8 * numel]  # the buffer alone; a copy


def test_allocated_memory_has_readers_until_they_are_done(pair: list[Collectives]) -> None:
    buffer = pair[0].channel.allocate(4, torch.float32).fill_(5)
    gathered = torch.zeros(8)
    begun = [
        pair[0].all_gather_single(torch.zeros(8), buffer),
        pair[1].all_gather_single(gathered, torch.ones(4)),
    ]
    begun[0].complete()
    with ThreadPoolExecutor(1) as pool:
        free = pool.submit(pair[0].channel.await_readers, buffer[1:])
        with pytest.raises(FutureTimeout):
            free.result(0.05)
        begun[1].complete()
        free.result(5)
    buffer.zero_()
    assert gathered.tolist() == [5.0] * 4 + [1.0] * 4


def test_a_rank_that_has_left_lends_no_memory(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    channel.leave(0.0)
    with pytest.raises(ShmError, match=r"a buffer of 4 .*: this rank has left group"):
        channel.allocate(4, torch.float32)
    assert channel.arena.nbytes == 0


def test_a_sum_in_allocated_memory_leaves_peers_what_they_read(pair: list[Collectives]) -> None:
    tensors = [end.channel.allocate(4, torch.float32).fill_(rank + 1.0) for rank, end in enumerate(pair)]
    begun = [end.all_reduce(tensor, 0) for end, tensor in zip(pair, tensors, strict=True)]
    for operation in begun:
        operation.complete()
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 4] * 2


def test_allocated_memory_comes_back_with_its_last_tensor(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    view = channel.allocate(1 << 16, torch.float32)[5:]
    other = channel.allocate(1 << 16, torch.float32)
    assert channel.arena.nbytes == 2 << 18
    del view, other
    kept = [channel.allocate(1 << 16, torch.float32) for _ in range(2)]
    assert channel.arena.nbytes == 2 << 18
    channel.leave(0)
    assert kept[0].fill_(3).sum() == 3 << 16


@pytest.mark.parametrize(("numel", "nbytes"), [(INLINE, 0), (INLINE + 1, 1 << 16)])
def test_only_long_contents_take_memory_of_their_own(
    pair: list[Collectives], numel: int, nbytes: int
) -> None:
    tensors = [torch.full((numel,), value, dtype=torch.uint8) for value in (7, 0)]
    for operation in [end.broadcast(t, 0) for end, t in zip(pair, tensors, strict=True)]:
        operation.complete()
    assert tensors[1].eq(7).all()
    assert [end.channel.arena.nbytes for end in pair] == [nbytes, 0]


def test_memory_is_used_again_by_calls_that_all_have_read(pair: list[Collectives]) -> None:
    first, second = pair
    begun = [first.broadcast(torch.ones(1 << 14), 0) for _ in range(2)]
    assert first.channel.arena.nbytes == 2 << 16
    second.broadcast(torch.zeros(1 << 14), 0).complete()
    first.broadcast(torch.ones(1 << 14), 0)
    assert first.channel.arena.nbytes == 2 << 16
    first.broadcast(torch.ones(1 << 14), 0)
    assert first.channel.arena.nbytes == 3 << 16
    assert len(first.channel._in_use) == 3
    assert not any(operation.is_done for operation in begun[1:])


def test_memory_is_kept_until_the_last_reader_is_done() -> None:
    ends = [Collectives(channel) for channel in meet_all(3)]
    writer, *readers = ends

    def broadcast() -> list[Operation]:
        writer.broadcast(torch.ones(1 << 14), 0)
        return [end.broadcast(torch.zeros(1 << 14), 0) for end in readers]

    first = broadcast()
    first[0].complete()
    broadcast()
    assert writer.channel.arena.nbytes == 2 << 16
    first[1].complete()
    broadcast()
    assert writer.channel.arena.nbytes == 2 << 16
    for end in ends:
        end.channel.leave(0)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES])
def test_what_a_peer_posted_and_cannot_be_mapped_is_an_error_of_the_call(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: object) -> Segment:
        raise OSError(number, "not here")

    waiting = [end.all_reduce(torch.ones(1 << 16), 0) for end in pair]
    monkeypatch.setattr(Segment, "open", refuse)
    with pytest.raises(
        ShmError, match=r"^rank 1 .* of group g has posted \d+ bytes that cannot be mapped"
    ) as error:
        waiting[0].complete()
    assert type(error.value) is (PeerLost if number == errno.ENOENT else ShmError)


def test_two_threads_may_map_the_memory_of_a_peer(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, stat = pair[0].channel.others[0], os.stat

    def forgetting(path: str) -> os.stat_result:
        peer.forget()  # as another thread does that sees the same
        found = stat(path)
        if path.startswith("/proc"):
            raise FileNotFoundError(path)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", forgetting)
        for numel in (1 << 15, 1 << 17):  # the first segment is given up for a larger one
            tensors = [torch.ones(numel) for _ in pair]
            for operation in [end.all_reduce(t, 0) for end, t in zip(pair, tensors, strict=True)]:
                operation.complete()
    assert all(tensor.eq(2).all() for tensor in tensors)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EMFILE, errno.ENFILE])
def test_contents_without_room_for_them_name_the_limits(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: object) -> Segment:
        raise OSError(number, "none")

    waiting = [end.all_reduce(torch.ones(1 << 16), 0) for end in pair]
    monkeypatch.setattr(Segment, "open", refuse)
    with pytest.raises(OutOfSharedMemory) as error:
        waiting[0].complete()
    assert str(error.value) == (
        f"rank 1 (pid {os.getpid()}) of group g has posted {1 << 18} bytes that cannot be mapped: "
        f"[Errno {number}] none. {WHAT_TO_RAISE}."
    )
