"""The faults that a test expects, by `faults.expect`, and what has happened to its ranks.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from lockstep.protocol import Expects, Happened, Vote
from lockstep.world.diagnosis import Diagnosis, named
from lockstep.world.outcome import Died, RankOutcome

SETTLES_WITHIN = 15.0
"""Seconds in which all ranks have noticed that one was lost: three times what they wait (`losses.py`)."""


class Expectations:
    """Compares what happens in one run of an item with what its test expects.

    A rank is inside of a context from its own `Expects` on until the votes at the context's end are counted.
    Only what happens to it there is expected, and only by the contexts that it is inside of.
    """

    def __init__(self) -> None:
        self._inside: dict[int, list[Expects]] = defaultdict(list)
        """By rank, the contexts that it is inside of, or died in; the innermost last."""
        self._deaths: dict[int, Happened] = {}
        self._outside: set[int] = set()
        """The ranks that died outside of any context that expects it."""
        self._missed: list[str] = []
        self._causes: dict[int, str] = {}
        self._since = 0.0
        self._lost_at = float("-inf")

    def enter(self, rank: int, expected: Expects) -> None:
        """Note that a rank has entered a context."""
        self._inside[rank].append(expected)
        self.note_strike()

    def leave(self, votes: Sequence[Vote]) -> tuple[Happened, ...]:
        """End the innermost context of the ranks whose votes are of its end; return what happened inside."""
        leaving = [rank for rank, vote in enumerate(votes) if vote.inside == "expect"]
        depth = max((len(self._inside[rank]) for rank in leaving), default=0)
        if depth == 0:
            return ()
        happened = [each for rank, each in self._deaths.items() if len(self._inside[rank]) >= depth]
        for rank in leaving:
            if (vote := votes[rank]).outcome == "failed":
                text = f"rank {rank} of {len(votes)} failed: {vote.reason}"
                happened.append(Happened(rank, text, vote.more))
        for contexts in self._inside.values():
            ended = [each.text for each in contexts[depth - 1 :]]
            self._missed += [text for text in ended if not any(text in each.text for each in happened)]
            del contexts[depth - 1 :]
        return tuple(happened)

    def note_strike(self) -> None:
        """Count from now on how long ranks stand still."""
        self._since = time.monotonic()

    def note_loss(self) -> None:
        """Note that a rank has gone: others get an error."""
        self._lost_at = time.monotonic()

    def note_rebuilt(self) -> None:
        """Note that the ranks that are left are in new groups, in which none waits for one that has gone."""
        self._lost_at = float("-inf")

    def has_lost(self) -> bool:
        """Return whether a rank has gone, and the others have not met in a new world since."""
        return self._lost_at > float("-inf")

    def is_settling(self) -> bool:
        """Return whether ranks may still wait for one that has gone, for no longer than they do in vain."""
        return time.monotonic() < self._lost_at + SETTLES_WITHIN

    def note_death(self, outcome: RankOutcome, died: Died, size: int) -> None:
        """Note the death of a rank, and whether the test expects it, and whether it was ended for that."""
        rank = outcome.rank
        outcome.fate = replace(died, stood_still=rank in self._causes)
        sentence = self._causes.get(rank, f"rank {rank} of {size} {died.how}")
        at = outcome.struck[-1].at if outcome.struck else died.at
        self._deaths[rank] = Happened(rank, sentence, at)
        outcome.is_expected = any(each.text in sentence for each in self._inside[rank])
        if not outcome.is_expected:
            self._outside.add(rank)

    def culprits(self, found: Diagnosis, pending: set[int]) -> set[int]:
        """Return the ranks to end, so that others can go on, of a standstill that the test expects.

        None before the ranks have stood still for as long as the test says, unless no rank can get on.
        """
        seconds = float("inf") if found.is_hopeless else time.monotonic() - self._since
        culprits = {
            rank
            for rank in found.blame & pending
            if any(each.text in found.sentence and seconds >= each.within for each in self._inside[rank])
        }
        if culprits == pending:
            return set()
        self._causes |= dict.fromkeys(culprits, found.sentence)
        return culprits

    def missed(self) -> tuple[str, ...]:
        """Return what was expected and has not happened, with the ranks that it happened to outside."""
        still_open = [
            each.text
            for contexts in self._inside.values()
            for each in contexts
            if not any(
                each in self._inside[rank] and each.text in death.text for rank, death in self._deaths.items()
            )
        ]
        return tuple(self._describe(text) for text in dict.fromkeys([*self._missed, *still_open]))

    def _describe(self, text: str) -> str:
        outside = [rank for rank in self._outside if text in self._deaths[rank].text]
        return f'"{text}"' + (f"; {named(outside)} died outside of the block" if outside else "")
