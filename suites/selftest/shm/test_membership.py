"""A rank's part in a group: who is gone, what it may still do, and what the errors say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from lockstep.shm import futex, membership
from lockstep.shm.channel import Channel
from lockstep.shm.collectives import Collectives
from lockstep.shm.errors import CollectiveTimeout, GroupAborted, PeerLost, ShmError
from lockstep.shm.membership import Deaths
from lockstep.shm.memory import Segment
from lockstep.shm.peer import ABORTED, FAILED, LEFT, PRESENT, ControlLayout, Peer
from suites.selftest.shm.ends import SECOND, meet_all

PID = os.getpid()


def never(peer: Peer) -> bool:
    return False


def always(peer: Peer) -> bool:
    return True


@pytest.fixture
def ended() -> Iterator[int]:
    """The id of a process that has ended and is not yet waited for."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


def peer_of(rank: int, pid: int = PID) -> Peer:
    control = Segment.create(ControlLayout(3).nbytes, populate=False)
    peer = Peer(rank, pid, control)
    peer.change_state(PRESENT)
    return peer


def test_a_member_knows_its_peers() -> None:
    peers = [peer_of(rank) for rank in range(3)]
    member = Channel("g", peers, 1, 2.5, 0)
    assert (member.name, member.rank, member.size, member.timeout) == ("g", 1, 3, 2.5)
    assert member.me is peers[1]
    assert member.others == [peers[0], peers[2]]
    member.leave(0)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        (LEFT, PeerLost, "of group g has left the group: a call waits for it"),
        (ABORTED, GroupAborted, "has aborted group g, in which a call waits for it"),
        (FAILED, PeerLost, "of group g has failed, a call waits for it: its reason"),
    ],
    ids=["left", "aborted", "failed"],
)
def test_a_peer_that_is_gone_before_its_part_is_done_is_an_error(
    pair: list[Collectives], state: int, kind: type[ShmError], text: str
) -> None:
    channel, peer = pair[0].channel, pair[1].channel.me
    seen = channel.peers[1]
    channel.look_for_lost([seen], never, "a call")
    assert not channel.is_lost(seen)
    peer.change_state(state, "its reason")
    assert channel.is_lost(seen)
    channel.look_for_lost([seen], always, "a call")
    with pytest.raises(ShmError) as error:
        channel.look_for_lost([seen], never, "a call")
    assert type(error.value) is kind
    assert str(error.value) == f"rank 1 (pid {PID}) {text}"
    channel.check_alive(seen, "a call")


def test_a_peer_whose_process_has_ended_is_gone(ended: int) -> None:
    peers = [peer_of(0), peer_of(1, ended), peer_of(2)]
    channel = Channel("g", peers, 0, 1.0, 0)
    assert [channel.is_lost(peer) for peer in peers] == [False, True, False]
    channel.look_for_lost([peers[2]], never, "a call")
    channel.check_alive(peers[2], "a call")
    text = rf"^rank 1 \(pid {ended}\) of group g is gone: a call waits for it$"
    for _ in range(2):
        with pytest.raises(PeerLost, match=text):
            channel.check_alive(peers[1], "a call")
        with pytest.raises(PeerLost, match=text):
            channel.look_for_lost(peers[1:], never, "a call")
    channel.leave(0)


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        (LEFT, ShmError, "a call: this rank has left group g"),
        (ABORTED, GroupAborted, "a call: this rank has aborted group g"),
        (FAILED, ShmError, "a call: group g has failed on this rank: its reason"),
    ],
)
def test_a_rank_that_is_no_member_any_more_may_call_nothing(
    pair: list[Collectives], state: int, kind: type[ShmError], text: str
) -> None:
    channel = pair[0].channel
    channel.check_usable("a call")
    assert channel.is_usable()
    channel.me.change_state(state, "its reason")
    assert not channel.is_usable()
    for check in (channel.check_usable, lambda what: channel.look_for_lost([], never, what)):
        with pytest.raises(ShmError) as error:
            check("a call")
        assert type(error.value) is kind
        assert str(error.value) == text
    channel.check_process("a call")


def test_a_group_belongs_to_one_process(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    channel.pid += 1
    assert not channel.is_usable()
    for check in (channel.check_usable, channel.check_process):
        with pytest.raises(
            ShmError, match=rf"^a call: group g belongs to process {channel.pid}, of which this is a fork$"
        ):
            check("a call")
    channel.abort()
    channel.leave(0)
    channel.pid -= 1
    assert channel.me.state == PRESENT


def test_a_rank_that_has_left_does_not_abort(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    channel.abort()
    assert channel.me.state == ABORTED
    channel.me.change_state(LEFT)
    channel.abort()
    assert channel.me.state == LEFT


def test_a_wait_that_is_too_long_fails_and_names_who_is_missing() -> None:
    channels = meet_all(3, 0.05 * SECOND)
    channel = channels[0]
    waited, done = channel.others, {2}
    with pytest.raises(CollectiveTimeout) as error:
        channel.wait_until(waited[0], waited, lambda one: one.rank in done, "a call", None)
    text = rf"a call of group g timed out after \d\.\d s: it waits for rank 1 \(pid {PID}\)"
    assert re.fullmatch(text, str(error.value))
    assert channel.me.state == FAILED
    assert channel.me.reason == str(error.value)
    assert not membership.waits
    channel.me.change_state(PRESENT)
    channel = channels[1]
    with pytest.raises(CollectiveTimeout, match=rf"for rank 0 \(pid {PID}\), rank 2 \(pid {PID}\)$"):
        channel.wait_until(channel.others[0], channel.others, never, "a call", 0.01)
    channel = channels[2]
    with pytest.raises(CollectiveTimeout, match=r"it waits for any rank$"):
        channel.wait_until(channel.me, [], never, "a call", 0.01)
    for one in channels:
        one.leave(0)


def test_a_wait_looks_first_and_sleeps_until_the_bell(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pair[0].channel
    peer = channel.others[0]
    slept: list[tuple[int, int]] = []
    looks: list[int] = []
    idled: list[bool] = []
    monkeypatch.setattr(futex, "wait", lambda bell, seen: slept.append((bell, seen)))
    channel._spin, channel.idle = 3, lambda: idled.append(True)

    def at_look(number: int) -> None:
        looks.clear()
        slept.clear()
        idled.clear()
        channel.wait_until(
            peer, [peer], lambda one: looks.append(one.rank) or len(looks) == number, "a call", None
        )

    for number, sleeps, idles in ((1, 0, 0), (3, 0, 0), (4, 0, 0), (5, 1, 0), (6, 1, 1), (7, 2, 1)):
        at_look(number)
        assert (len(slept), len(idled)) == (sleeps, idles)
        assert set(slept) <= {(peer.bell, peer.rung())}
        assert looks == [1] * number


def test_a_long_wait_is_on_record_while_it_lasts(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    began, seen = time.monotonic(), []

    def is_done(peer: Peer) -> bool:
        if membership.waits:
            seen.append(dict(membership.waits))
        return bool(seen)

    channel.wait_until(channel.others[0], channel.others, is_done, ("a", "call"), None)
    ((thread, (what, since)),) = seen[0].items()
    assert (thread, what) == (threading.get_ident(), "('a', 'call')")
    assert began <= since <= time.monotonic()
    assert not membership.waits


def test_a_wait_may_have_a_limit_of_its_own(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    channel.timeout = 0.0
    until = time.monotonic() + 4 * futex.SLICE
    channel.wait_until(channel.others[0], channel.others, lambda _: time.monotonic() > until, "a call", 20.0)
    assert channel.me.state == PRESENT


def test_a_rank_lingers_for_a_moment_unless_it_is_done(
    pair: list[Collectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = pair[0].channel
    peer = channel.others[0]
    slept: list[tuple[int, int]] = []
    monkeypatch.setattr(futex, "wait", lambda bell, seen: slept.append((bell, seen)))
    channel.linger(peer, [peer], always, "a call", 0.0)
    assert not slept
    pair[1].channel.me.change_state(LEFT)
    channel.linger(peer, [peer], never, "a call", 0.0)  # woken early: the peer is not looked at
    assert slept == [(peer.bell, peer.rung())]
    monkeypatch.undo()
    with pytest.raises(PeerLost, match=r"rank 1 .* has left the group: a call waits for it"):
        channel.linger(peer, [peer], never, "a call", 0.0)


def test_lingering_ends_with_the_timeout_since_the_call(pair: list[Collectives]) -> None:
    channel = pair[0].channel
    peer = channel.others[0]
    channel.linger(peer, [peer], never, "a call", time.monotonic())
    with pytest.raises(CollectiveTimeout, match=r"a call of group g timed out after 3\d\.\d s: .* rank 1"):
        channel.linger(peer, [peer], never, "a call", time.monotonic() - 30)


def test_deaths_are_noticed_and_leave_no_descriptor(ended: int) -> None:
    before = os.listdir("/proc/self/fd")
    deaths = Deaths([peer_of(0), peer_of(5, ended), peer_of(2)])
    assert deaths.ranks() == deaths.ranks() == {5}
    assert not deaths._poll.poll(0)
    deaths.close()
    deaths.close()
    assert deaths.ranks() == {5}
    with pytest.raises(ProcessLookupError):
        Deaths([peer_of(0), peer_of(1, 1 << 22)])
    held = [fd for fd in os.listdir("/proc/self/fd") if fd not in before]
    assert not [fd for fd in held if "pidfd" in _target(fd)]


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_the_control_segment_has_room_for_all_lanes() -> None:
    for size in (1, 2, 3, 64):
        layout = ControlLayout(size)
        assert layout.header % 64 == layout.read % 64 == layout.headers % 64 == layout.contents % 64 == 0
        assert layout.header >= 40 + 16 + 328 + 16 * size
        assert layout.header - 64 < 40 + 16 + 328 + 16 * size
        assert layout.read == 1024 + 64 * (size + 1)
        assert layout.headers == layout.read + 8 * 32 * 2 * size
        assert layout.contents == layout.headers + layout.header * 32 * (size + 1)
        assert layout.nbytes == layout.contents + 8192 * 32 * (size + 1)


def test_the_reason_of_a_failure_is_cut_and_replaced() -> None:
    peer = peer_of(0)
    rung = peer.rung()
    peer.change_state(FAILED, "x" * 2000)
    assert peer.reason == "x" * 831
    assert peer.rung() == rung + 1
    peer.change_state(LEFT, "a\N{SNOWMAN}")
    assert (peer.reason, peer.state) == ("a\N{SNOWMAN}", LEFT)
    peer.change_state(LEFT)
    assert peer.reason == ""
    peer.change_state(FAILED, "x" * 830 + "\N{SNOWMAN}")
    assert peer.reason == "x" * 830 + "\N{REPLACEMENT CHARACTER}"


def test_a_segment_of_a_peer_is_mapped_once_until_it_is_given_up() -> None:
    peer = peer_of(0)
    first, second = Segment.create(1), Segment.create(1)
    mapped = peer.filled(first.handle)
    assert peer.filled(first.handle) is mapped
    other = peer.filled(second.handle)
    assert peer.filled(first.handle) is mapped
    assert len(peer._filled) == 2
    first.close()
    third = Segment.create(1)
    assert third.handle.fd == first.handle.fd
    peer.filled(third.handle)
    assert sorted(peer._filled) == sorted([second.handle.inode, third.handle.inode])
    assert peer.filled(second.handle) is other
    peer.forget()
    assert not peer._filled
    for segment in (second, third, peer.control):
        segment.close()


def test_a_forgotten_peer_is_not_kept_by_a_member_that_has_left(pair: list[Collectives]) -> None:
    for operation in [end.all_reduce(torch.ones(1 << 14), 0) for end in pair]:
        operation.complete()
    channel = pair[0].channel
    assert channel.others[0]._filled
    channel.leave(0)
    assert not channel.others[0]._filled
    assert channel.idle is None
