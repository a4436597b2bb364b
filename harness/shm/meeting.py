"""The ranks of a new group meet through its store: who they are, whether they can share memory, and where.

Each writes a card and reads those of all others, so that all have the same verdict on versions and hosts.
What only one rank finds out, it writes to the store.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.shm import futex
from lockstep.shm.channel import Channel
from lockstep.shm.errors import MeetingFailed, PeerLost
from lockstep.shm.memory import Handle, Segment
from lockstep.shm.peer import FAILED, JOINING, MAPPED, PRESENT, ControlLayout, Peer

__tracebackhide__ = True  # under pytest a failure points to the call

PROTOCOL = 1
"""Version of what ranks write to each other: to be counted up with each incompatible change."""

_SPINS = 50  # a round of a small collective takes 7 us with them and 14 us without; 200 were not faster
_FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Card:
    """The facts that a rank gives its peers of itself.

    Attributes:
        protocol: `PROTOCOL`.
        torch: Version of torch.
        host: What only processes that can open each other's memory have in common.
        pid: Process id.
        control: Control segment, as (descriptor, inode, size).
        error: Why it cannot take part.
    """

    protocol: int
    torch: str
    host: str
    pid: int
    control: tuple[int, int, int]
    error: str = ""


def this_host() -> str:
    """Return what processes have in common that can see each other in /proc: a boot, and a name space.

    Raises:
        RuntimeError: there is no /proc that can be read.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError as error:
        raise RuntimeError(
            f"the backend shm opens the memory of other ranks through /proc, and cannot read it: {error}. "
            "Mount /proc, or use gloo"
        ) from None
    return f"{os.uname().nodename} (boot {boot}, {space})"


def meet(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta, name: str) -> Channel:
    """Meet the other ranks of a group.

    Args:
        store: Store of the group alone.
        rank: Rank of this process in the group.
        size: How many there are.
        timeout: How long to wait for them, and of each wait later.
        name: Name of the group, for messages.

    Raises:
        MeetingFailed: they cannot share memory; on all ranks.
    """
    seconds = timeout.total_seconds()
    control = _introduce(store, rank, size)
    try:
        cards = _read_cards(store, size, timeout, name)
        if problem := _errors(cards) or _differences(cards):
            raise MeetingFailed(f"group {name}: {problem}")
        assert control is not None
        channel = _join(control, cards, rank, seconds, name)
    except BaseException as error:
        if control is not None:
            control.close()
        if isinstance(error, OSError):
            raise _agreed(store, error, f"group {name}: rank {rank}") from error
        raise
    try:
        channel.me.change_state(MAPPED)
        _await_all(store, channel, JOINING, seconds)
        with contextlib.suppress(Exception):  # not every store can
            store.delete_key(str(rank))
        channel.me.change_state(PRESENT)
        # None may meet again over the same store while it has cards of this meeting.
        _await_all(store, channel, MAPPED, seconds)
    except BaseException:
        channel.leave(0)
        raise
    return channel


def _introduce(store: dist.Store, rank: int, size: int) -> Segment | None:
    control, place, error = None, (0, 0, 0), ""
    try:
        if not futex.IS_OFFERED:
            raise OSError(f"not known for processors of {os.uname().machine}")
        control = Segment.create(ControlLayout(size).nbytes, populate=False)
        os.close(os.dup(control.handle.fd))  # one more: a store in a file needs it
        place = (control.handle.fd, control.handle.inode, control.handle.nbytes)
    except (OSError, MemoryError) as failure:
        error = f"{_with_limit(failure)} (for a group of {size} ranks)"
        if control is not None:
            control.close()
            control = None
    card = Card(PROTOCOL, torch.__version__, this_host(), os.getpid(), place, error)
    store.set(str(rank), json.dumps(asdict(card)))
    return control


def _read_cards(store: dist.Store, size: int, timeout: datetime.timedelta, name: str) -> list[Card]:
    cards = []
    for other in range(size):
        try:
            store.wait([str(other)], timeout)
        except RuntimeError as error:  # DistStoreError, but for FileStore
            seconds = timeout.total_seconds()
            text = f"rank {other} did not come to group {name} within {seconds:.1f} s"
            raise MeetingFailed(text) from error
        cards.append(_parse(store.get(str(other)), other))
    return cards


def _parse(text: bytes, rank: int) -> Card:
    fields = json.loads(text)
    if fields.get("protocol") != PROTOCOL:  # its other fields may mean something else
        fields = {"protocol": fields.get("protocol"), "torch": fields.get("torch", "")}
        return Card(**fields, host="", pid=0, control=(0, 0, 0))
    return Card(**{**fields, "control": tuple(fields["control"])})


def _errors(cards: Sequence[Card]) -> str:
    errors = [
        f"rank {rank} has no shared memory: {card.error}" for rank, card in enumerate(cards) if card.error
    ]
    return "; ".join(errors)


def _differences(cards: Sequence[Card]) -> str:
    """Return how ranks differ that cannot share memory."""
    first = cards[0]
    for rank, card in enumerate(cards):
        if card.protocol != first.protocol:
            both = (
                f"rank 0 speaks version {first.protocol} of the protocol, rank {rank} version {card.protocol}"
            )
            return f"{both}; use one version of lockstep.shm on all ranks"
        if card.torch != first.torch:
            both = f"rank 0 has torch {first.torch}, rank {rank} torch {card.torch}"
            return f"{both}; use one version on all ranks"
        if card.host != first.host:
            both = f"rank 0 is on {first.host}, rank {rank} on {card.host}"
            return f"backend shm is for ranks of one host: {both}; use gloo between hosts"
    return ""


def _join(control: Segment, cards: Sequence[Card], rank: int, seconds: float, name: str) -> Channel:
    peers = [
        Peer(one, card.pid, control if one == rank else _control_of(card)) for one, card in enumerate(cards)
    ]
    return Channel(name, peers, rank, seconds, _spins(cards))


def _spins(cards: Sequence[Card]) -> int:
    """Return how often a rank looks before it sleeps: again only where there are as many CPUs as ranks."""
    cpus: set[int] = set()
    for card in cards:
        with contextlib.suppress(ProcessLookupError):  # it is lost, which is seen next
            cpus |= os.sched_getaffinity(card.pid)
    return _SPINS if len(cards) <= len(cpus) else 0


def _agreed(store: dist.Store, error: OSError, who: str) -> MeetingFailed:
    """Return the error of the rank that was the first that could not map the memory of the others."""
    if isinstance(error, FileNotFoundError):  # a peer has given up, and is about to say why
        with contextlib.suppress(RuntimeError):
            store.wait([_FAILED], datetime.timedelta(seconds=2))
    if not _failure(store):
        store.set(_FAILED, f"{who} cannot map the memory of its peers: {_with_limit(error)}")
    return MeetingFailed(_failure(store))


def _failure(store: dist.Store) -> str:
    """Return why a rank could not map the memory of the others, "" if none has written so."""
    return store.get(_FAILED).decode() if store.check([_FAILED]) else ""


def _with_limit(error: Exception) -> str:
    """Return the text of an error, and what to do about it where that is known."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        remedy = f"`ulimit -n` is {soft}, and may be raised to {hard}"
        return f"{error}; a group takes a descriptor for each rank and some for memory: {remedy}"
    return str(error)


def _control_of(card: Card) -> Segment:
    return Segment.open(card.pid, Handle(*card.control), populate=False)


def _await_all(store: dist.Store, channel: Channel, state: int, seconds: float) -> None:
    """Wait until all ranks are past a state."""
    began = time.monotonic()
    for peer in channel.others:
        while peer.state <= state:
            seen = peer.rung()
            if peer.state <= state:
                futex.wait(peer.bell, seen)
            if peer.state > state:
                break
            try:
                channel.check_alive(peer, "the meeting")
                text = _failure(store)
            except PeerLost:
                text = ""
                with contextlib.suppress(RuntimeError):  # its process may have held the store
                    text = _failure(store)  # written before it ended
                if not text:
                    raise
            if text:
                channel.me.change_state(FAILED, text)
                raise MeetingFailed(text)
            if time.monotonic() - began > seconds:
                raise MeetingFailed(f"{peer} did not join group {channel.name} within {seconds:.1f} s")
