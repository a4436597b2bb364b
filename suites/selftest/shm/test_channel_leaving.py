"""Ranks of one process that leave or abort their group, and their peers, which read the rest."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest
import torch
import torch.distributed as dist

from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import GroupAborted, PeerLost
from lockstep.shm.meeting import meet
from lockstep.shm.p2p import ANY, Mailbox
from lockstep.shm.peer import LEFT, PRESENT, Peer
from lockstep.shm.work import Bundle, ShmWork
from suites.selftest.shm.ends import SECOND, meet_all


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
