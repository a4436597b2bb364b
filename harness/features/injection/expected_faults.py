"""The faults that a test injects, and those that it expects by `faults.expect`, as its run shows them.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from lockstep.features.injection.messages import (
    FEATURE,
    EndOfBlock,
    Expects,
    FaultHit,
    FromRank,
    Happened,
    LeavesByError,
    NewExample,
)
from lockstep.protocol import REBUILT, Part, Vote
from lockstep.world.diagnosis import Diagnosis, named
from lockstep.world.outcome import Died, ItemOutcome

if TYPE_CHECKING:
    from lockstep.world.item_run import ItemRun

SETTLES_WITHIN = 15.0
"""Seconds in which all ranks have noticed that one was lost: three times what they wait (`lost_peers.py`)."""
MOST_INJECTED = 5
"""Injected faults that a report lists."""


class ExpectedFaults:
    """Compares what happens in one run of an item with what its test expects.

    A rank is inside of a context from its own `Expects` on until the votes at the context's end are counted.
    Only what happens to it there is expected, and only by the contexts that it is inside of.
    """

    def __init__(self, run: ItemRun) -> None:
        self._run = run
        self._inside: dict[int, list[Expects]] = defaultdict(list)
        """Contexts that each rank is inside of, or died in; the innermost last."""
        self._hits: dict[int, list[FaultHit]] = defaultdict(list)
        """Injected faults that each rank has met."""
        self._deaths: dict[int, Happened] = {}
        self._outside: set[int] = set()
        """The ranks that died outside of any context that expects it."""
        self._missed: list[str] = []
        self._causes: dict[int, str] = {}
        self._since = 0.0
        self._lost: set[int] = set()
        """The ranks that have gone since the others last met in a new world."""
        self._lost_at = 0.0

    def handle(self, rank: int, message: FromRank) -> None:
        match message:
            case Expects():
                self._inside[rank].append(message)
                self._since = time.monotonic()
                for lost in self._lost:  # the rank may have had nothing that could take the message
                    self._run.send(rank, Part(FEATURE, lost))
            case FaultHit():
                self._hits[rank].append(message)
                self._since = time.monotonic()
            case NewExample():
                self._hits[rank].clear()
            case LeavesByError():
                self._note_loss(rank)
            case _:
                assert_never(message)

    def count_votes(self, votes: Sequence[Vote]) -> tuple[Happened, ...]:
        """End the innermost context of the ranks whose votes are of its end; return what happened inside."""
        for outcome, vote in zip(self._run.outcomes, votes, strict=True):
            if vote.outcome == "lost others":
                outcome.lost_others.append(vote.more.at)
        outcomes = {vote.outcome for vote in votes} - {"ended", "died"}
        if outcomes == {REBUILT}:
            self._lost.clear()  # in the new groups none waits for them
        leaving = [rank for rank, vote in enumerate(votes) if isinstance(vote.more, EndOfBlock)]
        depth = max((len(self._inside[rank]) for rank in leaving), default=0)
        if depth == 0:
            return ()
        happened = [each for rank, each in self._deaths.items() if len(self._inside[rank]) >= depth]
        for rank in leaving:
            if (vote := votes[rank]).outcome == "failed":
                text = f"rank {rank} of {len(votes)} failed: {vote.reason}"
                happened.append(Happened(rank, text, vote.more.at))
        for contexts in self._inside.values():
            ended = [each.text for each in contexts[depth - 1 :]]
            self._missed += [text for text in ended if not any(text in each.text for each in happened)]
            del contexts[depth - 1 :]
        return tuple(happened)

    def _note_loss(self, lost: int) -> None:
        """Let the others know that a rank closes its connections: they may wait for it without an end."""
        self._lost.add(lost)
        self._lost_at = time.monotonic()
        for outcome in self._run.outcomes:
            if outcome.fate is None and outcome.vote is None and outcome.rank != lost:
                self._run.send(outcome.rank, Part(FEATURE, lost))

    def note_death(self, rank: int, died: Died) -> str | None:
        """Note the death of a rank, perhaps by our own hand; return an excuse if the test expects it."""
        outcomes = self._run.outcomes
        if rank in self._causes:
            outcomes[rank].fate = replace(died, stood_still=True)
        sentence = self._causes.get(rank, f"rank {rank} of {len(outcomes)} {died.how}")
        hits = self._hits[rank]
        self._deaths[rank] = Happened(rank, sentence, hits[-1].at if hits else died.at)
        if not any(each.text in sentence for each in self._inside[rank]):
            self._outside.add(rank)
            return None
        self._note_loss(rank)
        return "as the test expects"

    def ranks_to_end(self, found: Diagnosis, pending: set[int]) -> set[int] | None:
        """Return the ranks to end, so that others can go on, of a standstill that the test expects.

        None of them before the ranks have stood still for as long as the test says, unless no rank can get
        on. Nor where ranks may still wait for one that has gone, which they do for a limited time.
        """
        seconds = float("inf") if found.is_hopeless else time.monotonic() - self._since
        culprits = {
            rank
            for rank in found.blame & pending
            if any(each.text in found.sentence and seconds >= each.within for each in self._inside[rank])
        }
        if culprits and culprits != pending:
            self._causes |= dict.fromkeys(culprits, found.sentence)
            return culprits
        is_settling = self._lost and time.monotonic() < self._lost_at + SETTLES_WITHIN
        return set() if is_settling else None

    def remarks(self, outcome: ItemOutcome) -> list[str]:
        """Name the latest faults that the test has injected, and what it expected that did not happen."""
        hits = sorted((hit for hits in self._hits.values() for hit in hits), key=lambda hit: hit.at)
        more = len(hits) - MOST_INJECTED
        lines = [f"injected by the test before: {more} faults more"] * (more > 0)
        lines += [f"injected by the test: {hit.text}" for hit in hits[-MOST_INJECTED:]]
        missed = self._describe_missed()
        lines += [f"expected by the test, and not seen: {text}" for text in missed]
        first = outcome.ranks[0]
        can_be_rebuilt = (
            first.spec is not None
            and first.spec.key.has_group
            and all(each.host == first.host for each in outcome.ranks)
        )
        if self._lost and not missed and can_be_rebuilt:
            lines.append("no world.rebuild() since the expected fault: groups of before do not work")
        return lines

    def _describe_missed(self) -> list[str]:
        """Return what was expected and has not happened, with the ranks that it happened to outside."""
        still_open = [
            each.text
            for contexts in self._inside.values()
            for each in contexts
            if not any(
                each in self._inside[rank] and each.text in death.text for rank, death in self._deaths.items()
            )
        ]
        missed = []
        for text in dict.fromkeys([*self._missed, *still_open]):
            outside = [rank for rank in self._outside if text in self._deaths[rank].text]
            missed.append(f'"{text}"' + (f"; {named(outside)} died outside of the block" if outside else ""))
        return missed
