"""Texts of several ranks that say the same: what may differ in them, and warnings of all ranks as one.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace

import pytest

from lockstep.protocol import Warned
from lockstep.world.diagnosis import named
from lockstep.world.outcome import ItemOutcome

LEFT_BEHIND = "the test left behind "
"""Beginning of a rank's message on state and leaks."""
_OF_RANKS = ("RankStateWarning", "RankLeakWarning")


def without_addresses(text: str) -> str:
    """Return a text without the addresses of objects, and without the numbers of what a test left behind."""
    if LEFT_BEHIND in text:  # processes, descriptors, ports
        return re.sub(r"\d+", "N", text)
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)


def without_own_number(text: str, rank: int) -> str:
    """Return a text without the number of the rank that it is from: as a word, or behind "rank".

    Numbers in shapes and of collectives (`#1`) stay; so does a text that names other ranks too, which says
    the same on all of them.
    """
    named = re.findall(r"\brank[ _=-]?(\d+)", text)
    if any(int(number) != rank for number in named):
        return text
    return re.sub(rf"(?:(?<![\w.+#[-])|(?<=rank)|(?<=rank[_=-])){rank}(?!\w|\.\d)", "<its rank>", text)


def pass_on_warnings(item: pytest.Item, outcome: ItemOutcome) -> None:
    """Pass each warning of an item on to pytest once, however many ranks raised it."""
    for warned in _merge_warnings(outcome):
        item.config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": _to_message(warned),
                "when": "runtest",
                "nodeid": str(item.nodeid),
                "location": None,
            }
        )


def _merge_warnings(outcome: ItemOutcome) -> list[Warned]:
    """Return each warning of an item once, however many ranks raised it.

    Those on what a test left behind name the ranks unless all have left the same.
    """
    merged = dict.fromkeys(warned for rank in outcome.ranks for warned in rank.warnings)
    of_ranks: dict[object, dict[int, Warned]] = {}
    for rank in outcome.ranks:
        for warned in rank.warnings:
            if warned.category in _OF_RANKS:
                merged.pop(warned, None)
                key = warned.module, warned.category, warned.filename, warned.lineno
                of_ranks.setdefault(key, {}).setdefault(rank.rank, warned)
    everywhere = 0 if outcome.ranks[0].world else len(outcome.ranks)
    return [*merged, *(_merge_one(each, everywhere) for each in of_ranks.values())]


def _to_message(warned: Warned) -> warnings.WarningMessage:
    """Rebuild a warning; one whose class is unknown here keeps its name in the text."""
    category = getattr(sys.modules.get(warned.module), warned.category, None)
    text = warned.text
    if not (isinstance(category, type) and issubclass(category, Warning)):
        category, text = UserWarning, f"{warned.category}: {text}"
    return warnings.WarningMessage(text, category, warned.filename, warned.lineno)


def _merge_one(by_rank: dict[int, Warned], everywhere: int) -> Warned:
    alike: dict[str, list[int]] = {}
    for rank, warned in by_rank.items():
        alike.setdefault(without_addresses(warned.text), []).append(rank)
    lines = []
    for ranks in alike.values():
        text = by_rank[ranks[0]].text
        if len({by_rank[rank].text for rank in ranks}) > 1:
            text += f" (rank {ranks[0]}; the others differ from it in numbers alone)"
        lines.append(text if len(ranks) == everywhere else f"{named(ranks)}: {text}")
    return replace(next(iter(by_rank.values())), text="\n".join(lines))
