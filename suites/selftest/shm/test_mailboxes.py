"""Mailboxes of the ranks of a group, all in this process: which receive takes a message, and errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from lockstep.shm import OutOfSharedMemory
from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import CollectiveMismatch, CollectiveTimeout, PeerLost, ShmError
from lockstep.shm.p2p import ANY, Mailbox
from lockstep.shm.peer import DEPTH, WANTS_READ
from suites.selftest.shm.ends import meet_all


class Boxes:
    """The mailboxes of all ranks of a group, in this process."""

    def __init__(self, size: int, timeout: timedelta = timedelta(seconds=20)) -> None:
        self.ends = [Collectives(channel) for channel in meet_all(size, timeout)]
        self.boxes = [Mailbox(end.channel, end) for end in self.ends]

    def __getitem__(self, rank: int) -> Mailbox:
        return self.boxes[rank]


@pytest.fixture
def boxes() -> Iterator[Boxes]:
    made = Boxes(3)
    yield made
    for end in made.ends:
        end.channel.leave(0)


def named(rank: int) -> str:
    return f"rank {rank} (pid {os.getpid()})"


def test_a_message_goes_to_the_first_receive_that_fits(boxes: Boxes) -> None:
    tensors = [torch.zeros(2) for _ in range(4)]
    of_tag, of_other, of_any, second = (
        boxes[0].receive(tensors[0], 1, 7),
        boxes[0].receive(tensors[1], 2, 0),
        boxes[0].receive(tensors[2], ANY, 0),
        boxes[0].receive(tensors[3], 1, 0),
    )
    sent = [boxes[1].send(torch.full((2,), value), 0, tag) for value, tag in ((1.0, 0), (2.0, 0), (3.0, 7))]
    assert [message.number for message in sent] == [0, 1, 2]
    assert not any(message.try_complete() for message in sent)
    for receive in (of_any, second, of_tag):
        assert receive.try_complete()
        assert receive.source == 1
    assert not of_other.try_complete()
    assert of_other.source == -1
    assert [tensor.tolist() for tensor in tensors] == [[3.0] * 2, [0.0] * 2, [1.0] * 2, [2.0] * 2]
    assert all(message.try_complete() for message in sent)
    boxes[2].send(torch.full((2,), 4.0), 0, 0)
    of_other.complete()
    assert (of_other.source, tensors[1].tolist()) == (2, [4.0, 4.0])


def test_a_message_is_described_by_what_and_with_whom(boxes: Boxes) -> None:
    assert str(boxes[0].receive(torch.zeros(2), 1, 0)) == "recv of 2 float32 from rank 1"
    assert str(boxes[0].receive(torch.zeros(2), ANY, 3)) == "recv of 2 float32 with tag 3 from any rank"
    assert str(boxes[0].send(torch.zeros(2), 2, -1)) == "send of 2 float32 with tag -1 to rank 2"


def test_a_rank_that_cannot_be_sent_to_is_refused(boxes: Boxes) -> None:
    tensor = torch.zeros(1)
    for call, text in (
        (lambda: boxes[0].send(tensor, 3, 0), "cannot send to rank 3 of group g: it has 3"),
        (lambda: boxes[0].receive(tensor, -2, 0), "cannot receive from rank -2 of group g: it has 3"),
        (lambda: boxes[1].send(tensor, 1, 0), "rank 1 of group g cannot send to itself"),
        (lambda: boxes[1].receive(tensor, 1, 0), "rank 1 of group g cannot receive from itself"),
    ):
        with pytest.raises(ValueError, match=r".") as error:
            call()
        assert str(error.value) == text
    boxes[0].channel.leave(0)
    with pytest.raises(ShmError, match=r"^send to rank 1: this rank has left group g$"):
        boxes[0].send(tensor, 1, 0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("numel", [3, 10_000])
def test_messages_that_do_not_fit_fail_on_both_ranks(boxes: Boxes, when: str, numel: int) -> None:
    got = torch.zeros(2)
    if when == "before":
        receive = boxes[0].receive(got, 1, 5)
    sent = boxes[1].send(torch.ones(numel), 0, 5)
    beside = boxes[1].send(torch.ones(2), 0, 5)
    if when == "after":
        receive = boxes[0].receive(got, ANY, 5)
    text = (
        f"ranks of group g disagree about a message: {named(1)} called send of {numel} float32 with tag 5, "
        f"{named(0)} called recv of 2 float32 with tag 5"
    )
    for transfer in (receive, sent):
        with pytest.raises(CollectiveMismatch) as error:
            transfer.complete()
        assert str(error.value) == text
        with pytest.raises(CollectiveMismatch):
            transfer.complete()
    assert got.tolist() == [0.0, 0.0]
    boxes[0].receive(got, 1, 5).complete()
    beside.complete()
    assert got.tolist() == [1.0, 1.0]
    boxes[1].receive(got, 0, 0)
    boxes[0].send(torch.ones(2) * 9, 1, 0).try_complete()
    assert boxes[1].exchange() is None
    assert got.tolist() == [9.0, 9.0]


def test_messages_of_other_dtypes_do_not_fit(boxes: Boxes) -> None:
    boxes[1].send(torch.ones(2, dtype=torch.int32), 0, 0)
    with pytest.raises(CollectiveMismatch, match=r"send of 2 int32, .* called recv of 2 float32$"):
        boxes[0].receive(torch.zeros(2), 1, 0).complete()


@pytest.mark.parametrize("numel", [2, 10_000])
def test_messages_that_none_expects_are_kept_when_the_ring_fills(boxes: Boxes, numel: int) -> None:
    sent = [boxes[1].send(torch.full((numel,), float(tag)), 0, tag) for tag in range(DEPTH // 2)]
    boxes[0].exchange()
    assert not any(message.try_complete() for message in sent)
    sent.append(boxes[1].send(torch.full((numel,), float(DEPTH // 2)), 0, DEPTH // 2))
    boxes[0].exchange()
    assert all(message.try_complete() for message in sent)
    mismatched = boxes[0].receive(torch.zeros(1), 1, 3)
    with pytest.raises(CollectiveMismatch):
        mismatched.complete()
    for tag in (16, 0, 5):
        got = torch.zeros(numel, 1)
        boxes[0].receive(got, ANY if tag else 1, tag).complete()
        assert got.eq(tag).all()


def test_more_messages_than_places_wait_for_one(boxes: Boxes) -> None:
    sent = [boxes[1].send(torch.full((1,), float(number)), 0, 0) for number in range(DEPTH + 3)]
    assert [message.number for message in sent[DEPTH:]] == [-1] * 3
    got = [torch.zeros(1) for _ in sent]
    for tensor in got[:DEPTH]:
        boxes[0].receive(tensor, 1, 0)
    boxes[1].exchange()
    assert [message.number for message in sent[DEPTH:]] == list(range(DEPTH, DEPTH + 3))
    assert all(message.is_done for message in sent[:DEPTH])
    for tensor in got[DEPTH:]:
        boxes[0].receive(tensor, 1, 0)
    assert [tensor.item() for tensor in got] == [float(number) for number in range(DEPTH + 3)]


def test_a_message_without_memory_is_an_error_of_both_ranks(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(nbytes: int, why: object) -> None:
        raise OutOfSharedMemory(f"{why}: no memory today")

    with monkeypatch.context() as patched:
        patched.setattr(boxes[1].channel.arena, "take", take)
        sent = boxes[1].send(torch.ones(10_000), 0, 4)
    after = boxes[1].send(torch.ones(10_000), 0, 4)
    got = torch.zeros(10_000)
    with pytest.raises(OutOfSharedMemory, match=r"^send of 10000 float32 with tag 4 to rank 0: no memory"):
        sent.complete()
    with pytest.raises(OutOfSharedMemory, match=r"rank 1 .* could not take part: send of .* no memory today"):
        boxes[0].receive(got, ANY, 9).complete()
    boxes[0].receive(got, 1, 4).complete()
    after.complete()
    assert got.eq(1).all()


def test_all_senders_gone_is_an_error_of_a_receive_from_any(boxes: Boxes) -> None:
    first = boxes[0].receive(torch.zeros(1), ANY, 0)
    beside = boxes[0].receive(torch.zeros(1), 1, 9)
    boxes[1].channel.leave(0)
    assert not first.try_complete()
    assert not first.has_failed()
    assert beside.has_failed()
    assert f"{named(1)} of group g has left the group: recv of 1 float32 with tag 9 from rank 1" in str(
        beside.error
    )
    boxes[2].channel.leave(0)
    assert first.try_complete()
    with pytest.raises(PeerLost) as error:
        first.complete()
    assert str(error.value) == "all peers of group g are gone: recv of 1 float32 from any rank waits"


def test_a_wait_for_a_message_ends_with_its_timeout() -> None:
    pair = Boxes(2)
    with pytest.raises(CollectiveTimeout, match=r"^recv of 1 float32 from rank 1 of group g timed out"):
        pair[0].receive(torch.zeros(1), 1, 0).complete(0.01)
    assert pair[0].channel.idle is None
    with pytest.raises(PeerLost, match=r"^all peers of group g are gone: recv of 1 float32 from any rank"):
        pair[1].receive(torch.zeros(1), ANY, 0).complete(0.01)
    for end in pair.ends:
        end.channel.leave(0)


def test_an_interrupted_wait_ends_the_message(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    receive = boxes[0].receive(torch.zeros(1), 1, 0)
    sent = boxes[0].send(torch.zeros(1), 2, 0)
    with monkeypatch.context() as patched:
        patched.setattr(boxes[0].channel, "wait_until", interrupt)
        for transfer in (receive, sent):
            with pytest.raises(KeyboardInterrupt):
                transfer.complete()
            assert transfer.is_done
            assert isinstance(transfer.error, KeyboardInterrupt)
            assert transfer.entry.completed
    assert boxes[0].channel.idle is None
    assert not boxes[0].channel.me.words[WANTS_READ]


def test_a_rank_that_waits_exchanges_the_messages_it_has(boxes: Boxes) -> None:
    assert boxes[0].channel.idle is None
    receive = boxes[0].receive(torch.zeros(1), 1, 0)
    assert boxes[0].channel.idle == boxes[0].exchange
    sent = boxes[1].send(torch.zeros(1), 0, 0)
    assert boxes[1].channel.idle == boxes[1].exchange
    receive.complete()
    sent.complete()
    assert boxes[0].channel.idle is None
    assert boxes[1].channel.idle is None


def test_messages_are_left_to_the_thread_that_exchanges_them(boxes: Boxes) -> None:
    receive = boxes[0].receive(torch.zeros(1), 1, 0)
    boxes[1].send(torch.zeros(1), 0, 0)
    with boxes[0]._exchanging, ThreadPoolExecutor(1) as pool:
        assert pool.submit(receive.try_complete).result(5) is False
    with boxes[0].channel.lock, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(boxes[0].send, torch.zeros(1), 2, 0).result(5)
        assert sent.number == -1
    boxes[0].exchange()
    assert sent.number == 0
    assert receive.is_done


def test_a_message_that_came_is_completed_while_it_lingers(boxes: Boxes) -> None:
    first, second = (boxes[0].receive(torch.zeros(1), source, 0) for source in (1, ANY))
    assert not first.has_failed()
    first.linger(time.monotonic())
    assert not first.is_done
    boxes[1].send(torch.ones(1), 0, 0)
    boxes[2].send(torch.ones(1), 0, 0)
    assert first.try_complete()
    second.linger(time.monotonic())
    assert second.is_done
    assert second.error is None
    late = boxes[0].receive(torch.zeros(1), 1, 0)
    late.linger(time.monotonic() - 60)
    assert isinstance(late.error, CollectiveTimeout)
    assert late.is_done


def test_a_forked_child_exchanges_no_messages(boxes: Boxes) -> None:
    boxes[0].channel.pid += 1
    with pytest.raises(ShmError, match=r"^a message: group g belongs to process"):
        boxes[0].exchange()
    boxes[0].channel.pid -= 1
