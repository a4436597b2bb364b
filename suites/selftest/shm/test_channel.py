"""The channel between ranks and its memory: two ends in one process."""

from __future__ import annotations

import errno
import importlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    OutOfSharedMemory,
    PeerLost,
    ShmError,
)
from lockstep.shm.meeting import meet
from lockstep.shm.memory import WHAT_TO_RAISE, Arena, Segment, available
from lockstep.shm.operation import Operation
from lockstep.shm.p2p import ANY, Mailbox
from lockstep.shm.peer import DEPTH, INLINE, LEFT, PRESENT, WANTS_READ, Peer
from lockstep.shm.work import Bundle, ShmWork
from suites.selftest.shm.ends import SECOND, meet_all


def test_both_ranks_see_the_sum(pair: list[Collectives]) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])]
    begun = [end.all_reduce(tensor, 0) for end, tensor in zip(pair, tensors, strict=True)]
    for operation in begun:
        operation.complete()
    assert [tensor.tolist() for tensor in tensors] == [[11.0, 22.0]] * 2


@pytest.mark.parametrize("numel", [1, INLINE // 4, INLINE // 4 + 1, 1 << 20])
def test_operations_are_waited_for_in_any_order(pair: list[Collectives], numel: int) -> None:
    outputs = [[torch.zeros(2 * numel) for _ in range(3)] for _ in pair]
    begun = [
        [
            end.all_gather_single(output, torch.full((numel,), 10.0 * number + rank))
            for number, output in enumerate(outputs[rank])
        ]
        for rank, end in enumerate(pair)
    ]
    for operation in (*begun[0], *reversed(begun[1])):
        operation.complete()
    for of_rank in outputs:
        for number, output in enumerate(of_rank):
            expected = [torch.full((numel,), 10.0 * number + rank) for rank in range(2)]
            assert output.equal(torch.cat(expected))


def test_more_operations_than_slots_may_be_in_flight(pair: list[Collectives]) -> None:
    tensors = [[torch.full((3,), float(number)) for number in range(3 * DEPTH)] for _ in pair]

    def run(rank: int) -> None:
        begun = [pair[rank].all_reduce(tensor, 0) for tensor in tensors[rank]]
        for operation in begun:
            operation.complete()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    for of_rank in tensors:
        assert [tensor.tolist() for tensor in of_rank] == [[2.0 * n] * 3 for n in range(3 * DEPTH)]


def test_a_mismatch_names_both_calls_on_both_ranks(pair: list[Collectives]) -> None:
    begun = [pair[0].all_reduce(torch.ones(4), 0), pair[1].barrier()]
    for operation, first, second in zip(begun, (0, 1), (1, 0), strict=True):
        with pytest.raises(CollectiveMismatch) as error:
            operation.complete()
        calls = ["all_reduce (SUM) of 4 float32", "barrier"]
        pid = os.getpid()
        ours, theirs = (f"rank {n} (pid {pid}) called {calls[n]}" for n in (first, second))
        assert f"as #1 of group g: {ours}, {theirs}" in str(error.value)
    after = [end.barrier() for end in pair]
    for operation in after:
        operation.complete()


def test_a_wait_ends_with_the_timeout_and_says_for_whom() -> None:
    ends = [Collectives(channel) for channel in meet_all(2, 0.1 * SECOND)]
    waiting = ends[0].all_reduce(torch.ones(4), 0)
    with pytest.raises(CollectiveTimeout, match=r"all_reduce \(SUM\) of 4 float32 \(#1\).*waits for rank 1"):
        waiting.complete()
    ends[1].all_reduce(torch.ones(4), 0).complete()  # what rank 0 called before
    with pytest.raises(PeerLost, match=r"barrier \(#2\) waits for it: .* timed out after 0.1 s"):
        ends[1].barrier().complete()
    for end in ends:
        end.channel.leave(0)


def test_abort_frees_a_rank_that_waits(pair: list[Collectives]) -> None:
    waiting = pair[0].barrier()
    with ThreadPoolExecutor(1) as pool:
        freed = pool.submit(waiting.complete)
        pair[1].channel.abort()
        with pytest.raises(GroupAborted, match=r"rank 1 .* has aborted group g"):
            freed.result(5)


def test_a_rank_that_has_left_is_named(pair: list[Collectives]) -> None:
    pair[1].channel.leave(0)
    with pytest.raises(PeerLost, match=r"rank 1 .* has left the group"):
        pair[0].barrier().complete()


def test_what_was_posted_before_leaving_is_read(pair: list[Collectives]) -> None:
    tensors = [torch.ones(1 << 16), torch.full((1 << 16,), 2.0)]
    first, second = (end.all_reduce(t, 0) for end, t in zip(pair, tensors, strict=True))
    second.complete()
    leaving = threading.Thread(target=pair[1].channel.leave, args=(20,))
    leaving.start()
    first.complete()
    leaving.join()
    assert tensors[0].eq(3).all()


def test_descriptors_are_closed_when_all_have_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ends = [Collectives(channel) for channel in meet_all(3)]
    begun = [end.all_reduce(torch.ones(1 << 16), 0) for end in ends]
    for operation in begun:
        operation.complete()
    for end in ends:
        end.channel.leave(5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_used_again(pair: list[Collectives]) -> None:
    for _ in range(20):
        for operation in [end.all_reduce(torch.ones(1 << 16), 0) for end in pair]:
            operation.complete()
    assert [end.channel.arena.nbytes for end in pair] == [1 << 18, 1 << 18]


def test_a_segment_is_opened_by_its_inode_alone() -> None:
    segment = Segment.create(100)
    again = Segment.open(os.getpid(), segment.handle)
    segment.memory[7] = 5
    assert again.memory[7] == 5
    segment.close()
    other = Segment.create(100)
    assert other.handle.fd == segment.handle.fd
    with pytest.raises(FileNotFoundError, match="has closed"):
        Segment.open(os.getpid(), segment.handle)
    other.close()


@pytest.mark.parametrize(("limit", "left"), [("max", 4096 << 10), ("5000", 2000), ("8000000", 4096 << 10)])
def test_a_control_group_may_leave_less_memory(
    monkeypatch: pytest.MonkeyPatch, limit: str, left: int
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4096 kB\n",
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/memory.max": f"{limit}\n",
        "/sys/fs/cgroup/a/b/memory.current": "3000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[str(path)])
    assert available() == left


def test_a_segment_too_large_says_how_much_and_for_what() -> None:
    with pytest.raises(ShmError, match=r"all_reduce needs 1024 TiB .*iB are left.*`ulimit -v`"):
        Arena().take(1 << 50, "all_reduce")


def test_pieces_of_all_to_all_may_differ(pair: list[Collectives]) -> None:
    sent = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [20.0]])]
    received = [torch.zeros(2, 1), torch.zeros(3, 1)]
    begun = [
        pair[0].all_to_all_single(received[0], sent[0], [1, 1], [1, 2]),
        pair[1].all_to_all_single(received[1], sent[1], [2, 1], [1, 1]),
    ]
    for operation in begun:
        operation.complete()
    assert [tensor.flatten().tolist() for tensor in received] == [[1.0, 10.0], [2.0, 3.0, 20.0]]


def test_pieces_that_do_not_fit_are_named_on_both_ranks(pair: list[Collectives]) -> None:
    begun = [
        pair[0].all_to_all_single(torch.zeros(2), torch.zeros(3), [1, 1], [1, 2]),
        pair[1].all_to_all_single(torch.zeros(4), torch.zeros(2), [3, 1], [1, 1]),
    ]
    for operation in begun:
        with pytest.raises(
            CollectiveMismatch,
            match=r"rank 0 \(pid \d+\) sends 2 elements to rank 1 \(pid \d+\), which expects 3$",
        ):
            operation.complete()


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


def test_memory_that_was_lent_when_an_arena_closed_does_not_come_back() -> None:
    arena = Arena()
    lent = arena.lend(4, torch.float32, "a buffer")
    arena.close()
    del lent
    arena.take_back([])
    assert arena.nbytes == 0


def test_ranks_that_read_nothing_more_leave_at_once(pair: list[Collectives]) -> None:
    for end in pair:
        end.all_reduce(torch.ones(1 << 16), 0)  # no rank waits for it
    with ThreadPoolExecutor(2) as pool:
        leaving = [pool.submit(end.channel.leave, 8) for end in pair]
        for one in leaving:
            one.result(4)
    assert [end.channel.me.state for end in pair] == [LEFT, LEFT]


def test_a_store_may_be_used_again_at_once() -> None:
    class Slow(dist.Store):
        """A store whose keys go late."""

        def delete_key(self, key: str) -> bool:
            time.sleep(0.2)
            return store.delete_key(key)

        def __getattribute__(self, name: str) -> object:
            return object.__getattribute__(self, name) if name == "delete_key" else getattr(store, name)

    store = dist.HashStore()

    def run(rank: int) -> list[float]:
        found = []
        for turn in range(2):
            channel = meet(Slow() if rank else store, rank, 2, 20 * SECOND, f"{turn}")
            if turn:
                Collectives(channel).all_reduce(tensor := torch.ones(2), 0).complete()
                found = tensor.tolist()
            channel.leave(5)
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [[2.0, 2.0]] * 2


def test_a_handler_of_a_signal_may_abort_while_the_rank_rings(pair: list[Collectives]) -> None:
    channel = pair[0].channel

    def interrupted() -> None:
        with channel.me._ringing:
            channel.abort()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupted).result(5)
    with pytest.raises(GroupAborted, match="rank 0"):
        pair[1].barrier().complete()


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


def test_the_reason_of_a_refusal_may_be_long(pair: list[Collectives]) -> None:
    waiting = pair[1].barrier()
    pair[0].channel.refuse(ShmError("\N{HORIZONTAL ELLIPSIS}" * 1000))
    with pytest.raises(ShmError, match=r"rank 0 .* could not take part: \N{HORIZONTAL ELLIPSIS}+"):
        waiting.complete()


def test_what_was_sent_before_the_last_peer_left_is_received(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes = [Mailbox(end.channel, end) for end in pair]
    is_lost = pair[0].channel.is_lost

    def sent_in_between(peer: Peer) -> bool:
        if peer.state == PRESENT:
            boxes[1].send(torch.tensor([5.0]), 0, 0)
            pair[1].channel.leave(0)
        return is_lost(peer)

    monkeypatch.setattr(pair[0].channel, "is_lost", sent_in_between)
    receive = boxes[0].receive(tensor := torch.zeros(1), ANY, 0)
    receive.complete()
    assert tensor.item() == 5


def test_a_message_that_cannot_be_mapped_fails_its_receive_alone(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    def contents(*args: object) -> None:
        raise PeerLost("its memory is gone")

    boxes = [Mailbox(end.channel, end) for end in pair]
    for tag in range(DEPTH):
        boxes[0].send(torch.ones(INLINE), 1, tag)
    monkeypatch.setattr(pair[1].channel, "contents", contents)
    boxes[1].exchange()  # as a wait for anything else does
    with pytest.raises(PeerLost, match="its memory is gone"):
        boxes[1].receive(torch.zeros(INLINE), 0, 3).complete()


def test_a_bundle_of_works_that_are_done_does_not_linger(pair: list[Collectives]) -> None:
    works = [ShmWork(end.barrier(), []) for end in pair]
    bundle = Bundle(works)
    for work in works:
        work.wait()
    bundle.linger(time.monotonic())  # another thread has completed them since `is_done` was read
    assert bundle.is_done


def test_a_work_that_is_polled_fails_when_a_peer_has_left(pair: list[Collectives]) -> None:
    box = Mailbox(pair[0].channel, pair[0])
    receive = box.receive(torch.zeros(1), 1, 0)
    works = [ShmWork(pending, []) for pending in (pair[0].barrier(), receive)]
    works.append(ShmWork(Bundle([ShmWork(pair[0].barrier(), []), works[0]]), []))
    assert not any(work.is_completed() for work in works)
    pair[1].channel.leave(0)
    for work in works:
        assert work.is_completed()
        assert not work.is_success()
        assert "has left the group" in str(work.exception())


def test_a_receive_that_lingers_fails_when_its_peer_has_left(pair: list[Collectives]) -> None:
    receive = Mailbox(pair[0].channel, pair[0]).receive(torch.zeros(1), 1, 0)
    pair[1].channel.leave(0)
    for _ in range(20):  # a bell that has rung ends one early
        receive.linger(time.monotonic())
    assert receive.is_done
    assert "has left the group" in str(receive.error)


@pytest.mark.parametrize(("numel", "nbytes"), [(INLINE, 0), (INLINE + 1, 1 << 16)])
def test_only_long_contents_take_memory_of_their_own(
    pair: list[Collectives], numel: int, nbytes: int
) -> None:
    tensors = [torch.full((numel,), value, dtype=torch.uint8) for value in (7, 0)]
    for operation in [end.broadcast(t, 0) for end, t in zip(pair, tensors, strict=True)]:
        operation.complete()
    assert tensors[1].eq(7).all()
    assert [end.channel.arena.nbytes for end in pair] == [nbytes, 0]


def test_a_refusal_has_the_kind_of_its_error(pair: list[Collectives]) -> None:
    for error in (ShmError("why"), OutOfSharedMemory("why")):
        waiting = pair[1].barrier()
        pair[0].channel.refuse(error)
        with pytest.raises(ShmError) as raised:
            waiting.complete()
        assert type(raised.value) is type(error)
        text = f"rank 0 (pid {os.getpid()}) of group g could not take part: why"
        assert str(raised.value) == text


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


def test_messages_are_in_lanes_and_read_one_by_one() -> None:
    channels = meet_all(3)
    first, second, third = channels
    for lane, text in ((0, b"all"), (2, b"second"), (3, b"third"), (3, b"again")):
        with first.lock:
            message = first.begin(len(text), "a message", lane)
            assert message.is_inline
            message.segment.memory[message.offset : message.offset + len(text)] = text
            first.post(message, b"of " + text, b"!" * 48)
    assert first.next_number == 1
    sender = second.peers[0]
    for reader, lane, number, text in (
        (second, 0, 0, b"all"),
        (third, 0, 0, b"all"),
        (second, 2, 0, b"second"),
        (third, 3, 0, b"third"),
        (third, 3, 1, b"again"),
    ):
        reader.wait_for(number, "a message", [sender], lane)
        assert reader.arrived(sender, number, lane)
        assert not reader.arrived(sender, number + (2 if lane == 3 and not number else 1), lane)
        assert reader.text(sender, number, lane) == b"of " + text
        assert reader.has_text(sender, number, reader.header(b"of " + text, number), lane)
        assert not reader.has_text(sender, number, reader.header(b"of " + text, number + 1), lane)
        assert reader.note(sender, number, b"of " + text, lane) == b"!" * 48
        segment, offset = reader.contents(sender, number, lane)
        assert segment is sender.control
        assert bytes(segment.memory[offset : offset + len(text)]) == text
        seen_as = first.peers[reader.rank]
        assert not first.is_read(seen_as, lane, number)
        reader.mark_read(number, [sender], lane)
        assert first.is_read(seen_as, lane, number)
    assert not first.is_read(first.peers[1], 0, 1)
    for channel in channels:
        channel.leave(0)


def test_a_reader_rings_only_for_a_rank_that_wants_to_know(pair: list[Collectives]) -> None:
    writer, reader = (end.channel for end in pair)
    rung = reader.me.rung()
    reader.mark_read(0)
    assert reader.me.rung() == rung
    with writer.wanting_reads():
        with writer.wanting_reads():
            reader.mark_read(0)
            assert reader.me.rung() == rung + 1
        reader.mark_read(0)
        assert reader.me.rung() == rung + 2
    reader.mark_read(0)
    assert reader.me.rung() == rung + 2


def test_a_lane_has_room_for_as_many_messages_as_its_ring(pair: list[Collectives]) -> None:
    writer, reader = (end.channel for end in pair)
    lane = 1 + reader.rank
    for number in range(DEPTH):
        assert writer.has_room(lane)
        message = writer.begin(0, "a message", lane)
        assert message.number == number
        writer.post(message, b"text")
    assert not writer.has_room(lane)
    reader.mark_read(0, [reader.peers[0]], lane)
    assert writer.has_room(lane)


def test_a_rank_that_leaves_waits_for_its_readers_only(pair: list[Collectives]) -> None:
    first, second = pair
    first.broadcast(torch.ones(1 << 16), 0)
    reading = second.broadcast(tensor := torch.zeros(1 << 16), 0)
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(first.channel.leave, 20)
        with pytest.raises(FutureTimeout):
            leaving.result(0.05)
        reading.complete()
        leaving.result(5)
    assert tensor.eq(1).all()
    assert first.channel.arena.nbytes == 0
    first.channel.leave(20)


def test_a_rank_that_leaves_waits_no_longer_than_its_patience(pair: list[Collectives]) -> None:
    pair[0].broadcast(torch.ones(1 << 16), 0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pair[0].channel.leave, 0.02).result(5)
    assert pair[0].channel.arena.nbytes == 0


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


def test_a_full_ring_waits_for_its_last_reader() -> None:
    ends = [Collectives(channel) for channel in meet_all(3)]
    writer, *readers = ends
    for _ in range(DEPTH):
        writer.broadcast(torch.ones(1), 0)
    reading = [end.broadcast(torch.zeros(1), 0) for end in readers]
    reading[0].complete()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(writer.broadcast, torch.ones(1), 0)
        with pytest.raises(FutureTimeout):
            waiting.result(0.05)
        reading[1].complete()
        assert waiting.result(5).call.number == DEPTH
    assert not writer.channel.me.words[WANTS_READ]
    for end in ends:
        end.channel.leave(0)


def test_the_last_line_that_a_traceback_shows_is_the_call(pair: list[Collectives]) -> None:
    pair[1].channel.leave(0)
    with pytest.raises(PeerLost) as error:
        pair[0].barrier().complete()
    shown = error.traceback.filter(error)
    assert Path(shown[-1].path) == Path(__file__)


@pytest.mark.parametrize(
    "name",
    [
        *("arguments", "channel", "coalesced", "collectives", "in_place", "interception", "meeting"),
        *("membership", "memory", "operation", "p2p", "peer", "process_group", "reduce", "work"),
    ],
)
def test_lines_of_the_backend_are_hidden_from_tracebacks(name: str) -> None:
    assert importlib.import_module(f"lockstep.shm.{name}").__tracebackhide__ is True
