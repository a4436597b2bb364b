"""Messages between two ranks: tags, any source, and the order in which they fit together. Imports torch only.

A message waits in its sender's memory until the receiver has taken it. Receives are matched in the order in
which they were called, with messages in the order in which they were sent. A sender waits until its message
is taken, as on gloo; every wait in the group lets expected messages arrive, so that a receive need not be
waited for first.
"""

from __future__ import annotations

import struct
import threading
from collections import deque

import torch
from torch import Tensor

from lockstep.shm import futex, signature
from lockstep.shm.channel import DEPTH, Channel, Peer
from lockstep.shm.collectives import Collectives, put, take
from lockstep.shm.errors import CollectiveMismatch, PeerLost, ShmError
from lockstep.shm.record import Entry, recorder

__tracebackhide__ = True  # under pytest a failure points to the call

ANY = -1
"""Instead of a source: any rank."""

_TAIL = struct.Struct("<qq")  # tag, and number of the message that it answers, or -1


def _describe(text: bytes) -> str:
    tag, _ = _TAIL.unpack(text[-_TAIL.size :])
    return signature.explain(text) + (f" with tag {tag}" if tag else "")


class Transfer:
    """One send or receive.

    Attributes:
        peer: The other rank, or `ANY`.
    """

    def __init__(self, box: Mailbox, op: str, tensor: Tensor, peer: int, tag: int) -> None:
        self.box, self.tensor, self.peer, self.tag = box, tensor, peer, tag
        self.text = signature.pack(op, tensor.dtype, (tensor.numel(),)) + _TAIL.pack(tag, -1)
        self.is_done = False
        self.error: BaseException | None = None
        self.entry = box.note(op, tensor, peer)

    def __str__(self) -> str:
        way = "to" if self.entry.op == "send" else "from"
        whom = "any rank" if self.peer == ANY else f"rank {self.peer}"
        return f"{_describe(self.text)} {way} {whom}"

    def try_complete(self) -> bool:
        """Complete it if that takes no waiting; return whether it is done, or has failed."""
        if not self.is_done:
            self.box.exchange()
        return self.is_done

    def complete(self, timeout: float | None = None) -> None:
        """Wait until it is done.

        Raises:
            ShmError: what this or another wait for it has met.
        """
        if not self.try_complete():
            peer, peers = self._waited_for()
            try:
                with self.box.channel.wanting_reads():
                    self.box.channel.wait_until(peer, peers, lambda _: self.try_complete(), self, timeout)
            except Exception as error:
                self.box.end(self, error)
            except BaseException as error:
                self.box.end(self, error)
                raise
        if self.error is not None:
            raise self.error

    def linger(self, since: float) -> None:
        """Sleep until a peer has done something, for some milliseconds; fail if none can or time is up."""
        channel = self.box.channel
        peer, peers = self._waited_for()
        try:
            with channel.wanting_reads():
                channel.linger(peer, peers, lambda _: self.try_complete(), self, since)
        except ShmError as error:
            self.box.end(self, error)

    def has_failed(self) -> bool:
        """Return whether it will never complete, as a peer is gone; without waiting."""
        try:
            self.box.channel.look_for_lost(self._waited_for()[1], lambda _: self.try_complete(), self)
        except ShmError as error:
            self.box.end(self, error)
        return self.is_done

    def _waited_for(self) -> tuple[Peer, list[Peer]]:
        """Return the peer that rings when something has happened, and the peers that must be alive."""
        channel = self.box.channel
        if self.peer != ANY:
            return channel.peers[self.peer], [channel.peers[self.peer]]
        if len(channel.others) == 1:
            return channel.others[0], channel.others
        return channel.me, []  # which senders wake, too


class Send(Transfer):
    """A message of this rank.

    Attributes:
        number: Number in the lane to the peer, once it is posted.
    """

    def __init__(self, box: Mailbox, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(box, "send", tensor, peer, tag)
        self.number = -1


class Receive(Transfer):
    """A message that this rank expects.

    Attributes:
        source: Who has sent it, once it is there.
    """

    def __init__(self, box: Mailbox, tensor: Tensor, peer: int, tag: int) -> None:
        super().__init__(box, "recv", tensor, peer, tag)
        self.source = -1

    def fits(self, message: Arrived) -> bool:
        return self.peer in (ANY, message.peer.rank) and (
            message.tag == self.tag or message.error is not None
        )


class Arrived:
    """A message of a peer that no receive has taken.

    Attributes:
        kept: Contents, where its sender has its memory back.
        error: Why its sender could not send it.
    """

    def __init__(self, peer: Peer, number: int, text: bytes, error: ShmError | None) -> None:
        self.peer, self.number, self.text, self.error = peer, number, text, error
        self.tag = _TAIL.unpack(text[-_TAIL.size :])[0] if text else 0
        self.kept: Tensor | None = None


class Mailbox:
    """The messages of one group, of this rank and to it.

    Args:
        channel: This rank's end of the group.
        collectives: Collectives of the same group, which have its description.
    """

    def __init__(self, channel: Channel, collectives: Collectives) -> None:
        self.channel = channel
        self._collectives = collectives
        self._lane = 1 + channel.rank
        self._looked_at = [0] * channel.size
        self._arrived: list[Arrived] = []
        self._expected: list[Receive] = []
        self._unsent: list[deque[Send | bytes]] = [deque() for _ in range(channel.size)]
        self._sent: list[Send] = []
        self._count = 0
        self._exchanging = threading.RLock()

    def send(self, tensor: Tensor, peer: int, tag: int) -> Send:
        """Start to send a tensor; it must not change until that is complete."""
        self._check(peer, "send to")
        with self._exchanging:
            message = Send(self, tensor, peer, tag)
            self._unsent[peer].append(message)
            self.exchange()
        return message

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Receive:
        """Start to receive into a tensor, from a rank or from `ANY`."""
        if peer != ANY:
            self._check(peer, "receive from")
        with self._exchanging:
            message = Receive(self, tensor, peer, tag)
            self._expected.append(message)
            self.exchange()
        return message

    def _check(self, peer: int, what: str) -> None:
        if not 0 <= peer < self.channel.size:
            raise ValueError(
                f"cannot {what} rank {peer} of group {self.channel.name}: it has {self.channel.size}"
            )
        if peer == self.channel.rank:
            raise ValueError(f"rank {peer} of group {self.channel.name} cannot {what} itself")
        self.channel.check_usable(f"{what} rank {peer}")

    def note(self, op: str, tensor: Tensor, peer: int) -> Entry:
        """Record a call."""
        self._count += 1
        entry = Entry(op, self._count, *(([tensor], []) if op == "send" else ([], [tensor])))
        entry.group, entry.description = self.channel.name, self._collectives.description
        entry.generation, entry.timeout = self._collectives.generation, self.channel.timeout
        entry.peer, entry.is_p2p = peer, True
        recorder.add(entry)
        return entry

    def end(self, transfer: Transfer, error: BaseException | None) -> None:
        """Note that a transfer is over."""
        with self._exchanging:
            if transfer.is_done:
                return
            transfer.error, transfer.is_done = error, True
            transfer.entry.complete()
            if isinstance(transfer, Receive):
                self._expected.remove(transfer)
            elif isinstance(transfer, Send):
                if transfer in self._sent:
                    self._sent.remove(transfer)
                else:
                    self._unsent[transfer.peer].remove(transfer)
            self._set_idle()

    def _set_idle(self) -> None:
        busy = self._expected or self._sent or any(self._unsent)
        self.channel.idle = self.exchange if busy else None

    def exchange(self) -> None:
        """Post messages, take expected ones, see which of this rank are taken: all that takes no waiting."""
        self.channel.check_process("a message")
        if not self._exchanging.acquire(blocking=False):
            return  # another thread does it
        try:
            for peer in self.channel.others:
                self._look(peer)
            self._match()
            for peer in self.channel.others:
                if self._unsent[peer.rank]:
                    self._post(peer)
            for message in list(self._sent):
                if self.channel.is_read(self.channel.peers[message.peer], 1 + message.peer, message.number):
                    self._look(self.channel.peers[message.peer])  # an objection comes before the mark
                    self.end(message, None)
            self._fail_any()
            self._set_idle()
        finally:
            self._exchanging.release()

    # -- receiving

    def _look(self, peer: Peer) -> None:
        """See what has arrived from a peer."""
        channel = self.channel
        while channel.arrived(peer, self._looked_at[peer.rank], self._lane):
            number = self._looked_at[peer.rank]
            self._looked_at[peer.rank] += 1
            futex.fence(channel.me.bell)
            try:
                text, error = channel.text(peer, number, self._lane), None
            except ShmError as failure:
                text, error = b"", failure
            answered = _TAIL.unpack(text[-_TAIL.size :])[1] if text else -1
            if answered < 0:
                self._arrived.append(Arrived(peer, number, text, error))
                continue
            channel.mark_read(number, [peer], self._lane)
            for message in list(self._sent):
                if (message.peer, message.number) == (peer.rank, answered):
                    self.end(message, self._mismatch(channel.me, message.text, peer, text))

    def _match(self) -> None:
        for message in list(self._arrived):
            for receive in self._expected:
                if receive.fits(message):
                    self._arrived.remove(message)
                    self._take(receive, message)
                    break
        for peer in self.channel.others:
            waiting = [
                one for one in self._arrived if one.peer is peer and one.kept is None and not one.error
            ]
            if len(waiting) > DEPTH // 2:  # its sender needs the places of those that are not expected
                for message in waiting:
                    self._keep(message)

    def _take(self, receive: Receive, message: Arrived) -> None:
        channel, peer, error = self.channel, message.peer, message.error
        try:
            if error is None:
                error = self._compare(receive, message)
            if error is None and message.kept is not None:
                receive.tensor.data.copy_(message.kept.view(receive.tensor.shape))
            elif error is None:
                take(receive.tensor, *channel.contents(peer, message.number, self._lane))
        except ShmError as failure:
            error = failure
        if message.kept is None:
            channel.mark_read(message.number, [peer], self._lane)
        receive.source = peer.rank
        self.end(receive, error)

    def _compare(self, receive: Receive, message: Arrived) -> ShmError | None:
        sent, expected = (signature.contents(text) for text in (message.text, receive.text))
        if sent == expected:
            return None
        if message.kept is None:
            answer = receive.text[: -_TAIL.size] + _TAIL.pack(receive.tag, message.number)
            self._unsent[message.peer.rank].appendleft(answer)
            self._post(message.peer)
        return self._mismatch(message.peer, message.text, self.channel.me, receive.text)

    def _mismatch(self, sender: Peer, sent: bytes, receiver: Peer, expected: bytes) -> CollectiveMismatch:
        return CollectiveMismatch(
            f"ranks of group {self.channel.name} disagree about a message: "
            f"{sender} called {_describe(sent)}, {receiver} called {_describe(expected)}"
        )

    def _keep(self, message: Arrived) -> None:
        """Copy a message that no receive expects yet, so that its sender can continue."""
        dtype, numel = signature.contents(message.text)
        try:
            contents = self.channel.contents(message.peer, message.number, self._lane)
        except ShmError as error:  # of the receive that will expect it, and of no other call
            message.error = error
            return
        message.kept = torch.empty(numel, dtype=dtype)
        take(message.kept, *contents)
        self.channel.mark_read(message.number, [message.peer], self._lane)

    def _fail_any(self) -> None:
        """Fail what is expected from any rank if all are gone."""
        waiting = [receive for receive in self._expected if receive.peer == ANY]
        if waiting and all(map(self.channel.is_lost, self.channel.others)):
            for peer in self.channel.others:  # it may have sent something just before it went
                self._look(peer)
            self._match()
            for receive in waiting:
                self.end(
                    receive, PeerLost(f"all peers of group {self.channel.name} are gone: {receive} waits")
                )

    # -- sending

    def _post(self, peer: Peer) -> None:
        """Post what is to be sent to a peer, as long as there are places."""
        channel, unsent, lane = self.channel, self._unsent[peer.rank], 1 + peer.rank
        if not channel.lock.acquire(blocking=False):
            return  # another thread waits for a place in another lane; later
        try:
            self._post_some(channel, unsent, lane)
        finally:
            channel.lock.release()
        futex.wake(peer.bell)  # it may wait for any of its peers

    def _post_some(self, channel: Channel, unsent: deque[Send | bytes], lane: int) -> None:
        while unsent and channel.has_room(lane):
            message = unsent[0]
            if isinstance(message, bytes):
                unsent.popleft()
                channel.post(channel.begin(0, "an answer", lane), message)
                continue
            try:
                written = channel.begin(message.tensor.nbytes, message, lane)
                put(message.tensor, written.segment, written.offset)
            except ShmError as error:
                self.end(message, error)
                if channel.is_usable():
                    channel.refuse(error, lane)
                continue
            unsent.popleft()
            message.number = written.number
            self._sent.append(message)
            channel.post(written, message.text)
