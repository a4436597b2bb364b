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
    from lockstep.rank.session import RankSession
    from lockstep.world.item_run import ItemRun
    from lockstep.world.outcome import ItemOutcome

FEATURE = "exchanges"

ANY_RANK = -1
"""Stands for the peer of a receive that takes what any rank sends."""


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
    call: str
    """The function that was called for the latest, "isend" say."""
    tensor: str
    """dtype and shape of the latest."""
    line: str


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
    for rank, channels in exchanged.items():
        for each in channels:
            taken_up = sum(
                other.begun
                for number, others in exchanged.items()
                for other in others
                if each.peer in (number, ANY_RANK)
                and other.peer in (rank, ANY_RANK)
                and (other.group, other.tag, other.is_send) == (each.group, each.tag, not each.is_send)
            )
            if each.waited < each.begun and taken_up < each.begun:
                peer = "any rank" if each.peer == ANY_RANK else f"rank {each.peer}"
                way, verb = ("to", "received") if each.is_send else ("from", "sent")
                what = f"{each.call} {way} {peer} ({each.tensor}) at {each.line} in flight"
                left[rank] = f"{what}: it was not {verb}"
    return left
