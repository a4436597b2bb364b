"""The meeting of the ranks of a group in one process: cards, verdicts, and who is at fault."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import gc
import json
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.shm import futex, meeting
from lockstep.shm.errors import MeetingFailed, PeerLost
from lockstep.shm.meeting import Card, meet, this_host
from lockstep.shm.memory import Segment
from lockstep.shm.peer import FAILED, PRESENT, ControlLayout
from suites.selftest.shm.ends import SECOND, meet_all

CARD = Card(meeting.PROTOCOL, "2.0", "here", 5, (1, 2, 3))


def descriptors() -> set[tuple[str, str]]:
    """Return the open descriptors, and what each is of."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the list itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.fixture
def no_descriptor_is_left() -> Iterator[None]:
    gc.collect()  # else what an earlier test has left may go in this one
    before = descriptors()
    yield
    assert descriptors() == before


def failing(rank: int, size: int, store: dist.Store, timeout: datetime.timedelta = 5 * SECOND) -> str:
    with pytest.raises(MeetingFailed) as error:
        meet(store, rank, size, timeout, "g")
    return str(error.value)


def test_ranks_that_have_met_are_present_and_leave_no_cards() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        channels = list(pool.map(lambda rank: meet(store, rank, 2, 3 * SECOND, "g"), range(2)))
    assert [channel.me.state for channel in channels] == [PRESENT, PRESENT]
    assert not store.check(["0"])
    assert not store.check(["1"])
    for rank, channel in enumerate(channels):
        assert (channel.rank, channel.size, channel.name, channel.timeout) == (rank, 2, "g", 3.0)
        assert [peer.pid for peer in channel.peers] == [os.getpid()] * 2
        channel.leave(0)


def test_ranks_look_more_than_once_where_each_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    for size, spin in ((1, 50), (cores, 50), (cores + 1, 0)):
        channels = meet_all(size)
        assert [channel._spin for channel in channels] == [spin] * size
        for channel in channels:
            channel.leave(0)


def test_ranks_that_are_bound_have_the_cpus_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = {5: {0}, 6: {0}, 7: {1}}
    monkeypatch.setattr(os, "sched_getaffinity", cpus.__getitem__)
    cards = {pid: dataclasses.replace(CARD, pid=pid) for pid in cpus}
    assert meeting._spins([cards[5], cards[7]]) == 50
    assert meeting._spins([cards[5], cards[6]]) == 0


def test_a_card_has_what_peers_must_know() -> None:
    store = dist.HashStore()
    control = meeting._introduce(store, 1, 2)
    assert control is not None
    handle = control.handle
    assert json.loads(store.get("1")) == {
        "protocol": 1,
        "torch": torch.__version__,
        "host": this_host(),
        "pid": os.getpid(),
        "control": [handle.fd, handle.inode, handle.nbytes],
        "error": "",
    }
    assert handle.nbytes >= ControlLayout(2).nbytes
    assert handle.nbytes - ControlLayout(2).nbytes < os.sysconf("SC_PAGE_SIZE")
    assert os.fstat(handle.fd).st_blocks == 0
    assert meeting._parse(store.get("1"), 1) == Card(
        1, torch.__version__, this_host(), os.getpid(), (handle.fd, handle.inode, handle.nbytes)
    )
    control.close()


def test_a_card_of_another_version_is_not_read_further() -> None:
    text = json.dumps({"protocol": 9, "torch": "3.0", "control": "elsewhere", "more": 1}).encode()
    assert meeting._parse(text, 0) == Card(9, "3.0", "", 0, (0, 0, 0))
    assert meeting._parse(b"{}", 0) == Card(None, "", "", 0, (0, 0, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, ""),
        ({"pid": 6, "control": (4, 5, 6)}, ""),
        (
            {"protocol": 7, "torch": "3.0", "host": "there"},
            "rank 0 speaks version 1 of the protocol, rank 2 version 7; "
            "use one version of lockstep.shm on all ranks",
        ),
        (
            {"torch": "3.0", "host": "there"},
            "rank 0 has torch 2.0, rank 2 torch 3.0; use one version on all ranks",
        ),
        (
            {"host": "there"},
            "backend shm is for ranks of one host: rank 0 is on here, rank 2 on there; "
            "use gloo between hosts",
        ),
    ],
)
def test_the_first_difference_between_ranks_is_named(change: dict[str, object], text: str) -> None:
    cards = [CARD, CARD, dataclasses.replace(CARD, **change)]
    assert meeting._differences(cards) == text
    assert meeting._errors(cards) == ""


def test_each_rank_without_memory_is_named() -> None:
    cards = [dataclasses.replace(CARD, error="a"), CARD, dataclasses.replace(CARD, error="b")]
    assert meeting._errors(cards) == "rank 0 has no shared memory: a; rank 2 has no shared memory: b"


def test_a_host_is_a_boot_and_a_name_space(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert this_host() == f"{os.uname().nodename} (boot {boot}, {os.readlink('/proc/self/ns/pid')})"

    def refuse(path: str) -> str:
        raise OSError(errno.EACCES, "not here")

    monkeypatch.setattr(os, "readlink", refuse)
    with pytest.raises(RuntimeError) as error:
        this_host()
    assert str(error.value) == (
        "the backend shm opens the memory of other ranks through /proc, and cannot read it: "
        "[Errno 13] not here. Mount /proc, or use gloo"
    )


@pytest.mark.usefixtures("no_descriptor_is_left")
def test_a_rank_that_does_not_come_is_named() -> None:
    text = failing(0, 2, dist.HashStore(), 0.1 * SECOND)
    assert text == "rank 1 did not come to group g within 0.1 s"


@pytest.mark.usefixtures("no_descriptor_is_left")
def test_ranks_of_another_host_do_not_meet() -> None:
    store = dist.HashStore()
    other = dataclasses.replace(CARD, torch=torch.__version__)
    store.set("1", json.dumps(dataclasses.asdict(other)))
    text = failing(0, 2, store)
    assert text.startswith(f"group g: backend shm is for ranks of one host: rank 0 is on {this_host()}, rank")


@pytest.mark.usefixtures("no_descriptor_is_left")
@pytest.mark.parametrize("place", ["create", "processor", "dup"])
def test_a_rank_without_shared_memory_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    store = dist.HashStore()
    with monkeypatch.context() as patched:
        if place == "create":
            patched.setattr(Segment, "create", refuse)
        elif place == "dup":
            patched.setattr(os, "dup", refuse)
        else:
            patched.setattr(futex, "IS_OFFERED", False)
        assert meeting._introduce(store, 1, 2) is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = (
        f"not known for processors of {os.uname().machine}"
        if place == "processor"
        else "[Errno 24] too many; a group takes a descriptor for each rank and some for memory: "
        f"`ulimit -n` is {soft}, and may be raised to {hard}"
    )
    assert failing(0, 2, store) == f"group g: rank 1 has no shared memory: {why} (for a group of 2 ranks)"


def card_of(segment: Segment, pid: int = os.getpid()) -> str:
    handle = segment.handle
    place = (handle.fd, handle.inode, handle.nbytes)
    return json.dumps(dataclasses.asdict(Card(1, torch.__version__, this_host(), pid, place)))


def test_a_rank_that_cannot_map_a_peers_memory_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, control = dist.HashStore(), Segment.create(ControlLayout(2).nbytes)
    store.set("1", card_of(control))

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EACCES, "not yours")

    monkeypatch.setattr(Segment, "open", refuse)
    text = "group g: rank 0 cannot map the memory of its peers: [Errno 13] not yours"
    assert failing(0, 2, store) == text
    assert store.get("failed").decode() == text
    control.close()


def test_the_first_rank_at_fault_is_named_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store, control = dist.HashStore(), Segment.create(ControlLayout(2).nbytes)
    store.set("1", card_of(control))
    store.set("failed", "rank 1 was first")
    control.close()
    assert failing(0, 2, store) == "rank 1 was first"
    assert store.get("failed") == b"rank 1 was first"


def test_a_rank_that_waits_for_a_peer_hears_of_a_failure() -> None:
    store, control = dist.HashStore(), Segment.create(ControlLayout(2).nbytes)
    store.set("1", card_of(control))
    store.set("failed", "rank 1 was first")
    assert failing(0, 2, store) == "rank 1 was first"
    control.close()


@pytest.mark.usefixtures("no_descriptor_is_left")
def test_a_rank_that_comes_and_does_not_join_is_named() -> None:
    store, control = dist.HashStore(), Segment.create(ControlLayout(2).nbytes)
    store.set("1", card_of(control))
    text = failing(0, 2, store, 0.1 * SECOND)
    assert text == f"rank 1 (pid {os.getpid()}) did not join group g within 0.1 s"
    control.close()


def test_a_rank_that_heard_of_a_failure_has_failed_for_its_peers() -> None:
    channels = meet_all(2)
    store = dist.HashStore()
    store.set("failed", "rank 1 was first")
    with pytest.raises(MeetingFailed, match=r"^rank 1 was first$"):
        meeting._await_all(store, channels[0], PRESENT, 5.0)
    assert (channels[0].me.state, channels[0].me.reason) == (FAILED, "rank 1 was first")
    for channel in channels:
        channel.leave(0)


class Closed(dist.HashStore):
    """The store of a process that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError(f"no connection to ask for {keys}")


@pytest.mark.parametrize("kind", ["said", "silent", "closed"])
def test_a_rank_that_said_why_before_it_ended_is_quoted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channels = meet_all(2)
    store = Closed() if kind == "closed" else dist.HashStore()
    if kind == "said":
        store.set("failed", "rank 1 was first")
    with monkeypatch.context() as patched:
        patched.setattr(channels[0], "_deaths", SimpleNamespace(ranks=lambda: {1}))
        with pytest.raises(MeetingFailed if kind == "said" else PeerLost) as error:
            meeting._await_all(store, channels[0], PRESENT, 5.0)
    lost = f"rank 1 (pid {os.getpid()}) of group g is gone: the meeting waits for it"
    assert str(error.value) == ("rank 1 was first" if kind == "said" else lost)
    for channel in channels:
        channel.leave(0)


def test_only_errors_of_descriptors_name_their_limit() -> None:
    assert meeting._with_limit(OSError(errno.ENOMEM, "none")) == "[Errno 12] none"
    assert meeting._with_limit(MemoryError("none")) == "none"
    for number in (errno.EMFILE, errno.ENFILE):
        assert "`ulimit -n` is" in meeting._with_limit(OSError(number, "many"))
