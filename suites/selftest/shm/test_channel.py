"""The channel between ranks, as two ends in one process: calls in any order, refusals, lanes and rings."""

from __future__ import annotations

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

import pytest
import torch

from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import CollectiveMismatch, CollectiveTimeout, OutOfSharedMemory, PeerLost, ShmError
from lockstep.shm.p2p import Mailbox
from lockstep.shm.peer import DEPTH, INLINE, WANTS_READ
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


def test_the_reason_of_a_refusal_may_be_long(pair: list[Collectives]) -> None:
    waiting = pair[1].barrier()
    pair[0].channel.refuse(ShmError("\N{HORIZONTAL ELLIPSIS}" * 1000))
    with pytest.raises(ShmError, match=r"rank 0 .* could not take part: \N{HORIZONTAL ELLIPSIS}+"):
        waiting.complete()


def test_a_refusal_has_the_kind_of_its_error(pair: list[Collectives]) -> None:
    for error in (ShmError("why"), OutOfSharedMemory("why")):
        waiting = pair[1].barrier()
        pair[0].channel.refuse(error)
        with pytest.raises(ShmError) as raised:
            waiting.complete()
        assert type(raised.value) is type(error)
        text = f"rank 0 (pid {os.getpid()}) of group g could not take part: why"
        assert str(raised.value) == text


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
