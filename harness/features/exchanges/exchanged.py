"""Records of sends and receives, and those that no other rank took up. Both sides; must not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    """How many of them have ended while the test had their handles."""
    call: str
    """The function that was called for the latest, "isend" say."""
    tensor: str
    """Its dtype and shape."""
    line: str


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
