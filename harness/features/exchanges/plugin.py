"""The plugin of exchanges: finds what ranks have left in flight. Sends and receives are seen on ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from lockstep.backends import meets
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.protocol import RankStatus
    from lockstep.rank.session import RankSession
    from lockstep.world.item_run import ItemRun
    from lockstep.world.outcome import ItemOutcome

FEATURE = "exchanges"

ANY_RANK = -1
"""Stands for the peer of a receive that takes what any rank sends."""
UNSEEN_WITHIN = 2.0
"""Seconds for a message to arrive that compiled code has sent, which is not seen."""


Key = tuple[str, bool, int, int]
"""The group, whether it is sends, the peer and the tag of a channel of messages."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The sends of a rank to another one in a test, or the receives from it, of one group and tag."""

    group: str
    is_send: bool
    peer: int
    tag: int
    begun: int
    waited: int
    """Number of them that have ended while the test had their handles."""
    failed: int
    """Number of waits for one that have raised: what the test has met is not left in flight."""
    call: str
    """The function that was called for the latest, "isend" say."""
    tensor: str
    """dtype and shape of the latest."""
    line: str

    @property
    def key(self) -> Key:
        return self.group, self.is_send, self.peer, self.tag


@dataclass(frozen=True, slots=True)
class Exchanging:
    """The sends and receives of a rank in a test so far, as part of its status.

    Attributes:
        begun: number of them by channel.
        awaited: the one whose end its main thread waits for, if no other thread may help; `begun` is its
            number in the channel.
        timeout: seconds after which that wait ends by itself.
    """

    begun: dict[Key, int]
    awaited: Exchanged | None
    timeout: float


# In a rank


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append("lockstep.features.exchanges.rank")


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and meets(session.world.backend):
        from lockstep.features.exchanges.rank import Exchanges

        exchanges = Exchanges(session.rank.spec.session.cwd, session.rank.group.members, config.pluginmanager)
        exchanges.install()
        config.pluginmanager.register(exchanges)
        session.rank.status.add_part(FEATURE, exchanges.current)


# In the controller


def pytest_ranks_outcome(run: ItemRun, outcome: ItemOutcome) -> None:
    """Name what ranks have left in flight: sends and receives of a test that passed, and collectives."""
    if not run.has_lost() and len({fate.collectives for fate in outcome.finished()}) > 1:
        _find_collectives(run, outcome)
    in_world = [rank for rank in outcome.ranks if not rank.has_left_world]
    exchanged = {rank.rank: parts[FEATURE] for rank in in_world if FEATURE in (parts := rank.parts())}
    if exchanged and all(rank.has_passed() for rank in in_world):
        for number, left in find_unpaired(exchanged).items():
            outcome.ranks[number].left_in_flight = left


def pytest_ranks_waits(run: ItemRun, statuses: Mapping[int, RankStatus]) -> Mapping[int, str] | None:
    """Return ranks that wait for a message which no rank has begun to send, or to receive."""
    found = {rank: part for rank, each in statuses.items() if (part := each.parts.get(FEATURE))}
    if not any(each.awaited for each in found.values()):
        return None
    from lockstep.world.diagnosis import PATIENT  # this module is imported in ranks, too

    ended = {rank.rank: begun_by_key(rank.parts().get(FEATURE, ())) for rank in run.outcomes}
    begun = ended | {rank: each.begun for rank, each in found.items()}
    patience = min(run.clock.timeout, PATIENT)
    return {
        rank: _described(each.awaited)
        for rank, each in found.items()
        if each.awaited
        and statuses[rank].blocked > UNSEEN_WITHIN
        and each.timeout >= patience
        and _taken_up(begun, rank, each.awaited) < each.awaited.begun
    }


def _described(awaited: Exchanged) -> str:
    way, preposition = ("send", "to") if awaited.is_send else ("receive", "from")
    words = f"to {way} {awaited.tensor} {preposition} {_peer_of(awaited)}"
    words += f" with tag {awaited.tag}" if awaited.tag else ""
    words += f" in group {awaited.group}" if awaited.group != DEFAULT_GROUP else ""
    return f"{words} ({awaited.call} at {awaited.line})"


def _find_collectives(run: ItemRun, outcome: ItemOutcome) -> None:
    """Find out what is in flight on ranks that ended after unequal numbers of collectives.

    The number alone proves nothing: it counts sends and receives too.
    """
    from lockstep.world.diagnosis import in_flight, name_of

    for rank, status in run.request_statuses(outcome.ended()).items():
        issued = in_flight(status)
        if issued is not None and issued.group == DEFAULT_GROUP:
            left = f"{name_of(issued)} in flight: not every rank has joined it"
            outcome.ranks[rank].left_in_flight = left


def find_unpaired(exchanged: Mapping[int, Iterable[Exchanged]]) -> dict[int, str]:
    """Return the ranks that have left a send or a receive in flight which no other rank took up, and which.

    What a rank has waited for was taken up, if not by what is counted: compiled code bypasses that.

    Args:
        exchanged: of all ranks, by rank.
    """
    left: dict[int, str] = {}
    begun = {rank: begun_by_key(channels) for rank, channels in exchanged.items()}
    for rank, channels in exchanged.items():
        for each in channels:
            if each.waited + each.failed < each.begun and _taken_up(begun, rank, each) < each.begun:
                way, verb = ("to", "received") if each.is_send else ("from", "sent")
                what = f"{each.call} {way} {_peer_of(each)} ({each.tensor}) at {each.line} in flight"
                left[rank] = f"{what}: it was not {verb}"
    return left


def begun_by_key(channels: Iterable[Exchanged]) -> dict[Key, int]:
    return {each.key: each.begun for each in channels}


def _taken_up(begun: Mapping[int, Mapping[Key, int]], rank: int, each: Exchanged) -> int:
    """Return how many messages of a rank's channel others have begun to take up, or to send."""
    peers = begun if each.peer == ANY_RANK else {each.peer} & begun.keys()
    return sum(
        begun[peer].get((each.group, not each.is_send, other, each.tag), 0)
        for peer in peers
        for other in (rank, ANY_RANK)
    )


def _peer_of(channel: Exchanged) -> str:
    return "any rank" if channel.peer == ANY_RANK else f"rank {channel.peer}"
