"""The faults that a test expects, by `faults.expect`, and what has happened to its ranks.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from harness.protocol import Expects, Happened
from harness.world.diagnosis import Diagnosis
from harness.world.outcome import Died, RankOutcome


class Expectations:
    """Compares what happens in one run of an item with what its test expects.

    Attributes:
        happened: deaths and standstills so far, as sentences.
    """

    def __init__(self) -> None:
        self.happened: list[Happened] = []
        self._expected: list[Expects] = []
        self._causes: dict[int, str] = {}
        self._since = 0.0

    def add(self, expected: Expects, outcomes: Sequence[RankOutcome]) -> None:
        """Expect something from now on; a rank may have died of it already."""
        self._expected.append(expected)
        self.note_strike()
        for outcome in outcomes:
            if isinstance(outcome.fate, Died):
                outcome.is_expected = self._is_expected(self._sentence(outcome, outcome.fate, len(outcomes)))

    def note_strike(self) -> None:
        """Count from now on how long ranks stand still."""
        self._since = time.monotonic()

    def note_death(self, outcome: RankOutcome, died: Died, size: int) -> None:
        """Note the death of a rank, and whether the test expects it."""
        sentence = self._sentence(outcome, died, size)
        at = outcome.struck[-1].at if outcome.struck else died.at
        self.happened.append(Happened(sentence, at))
        outcome.is_expected = self._is_expected(sentence)

    def _sentence(self, outcome: RankOutcome, died: Died, size: int) -> str:
        return self._causes.get(outcome.rank, f"rank {outcome.rank} of {size} {died.how}")

    def culprits(self, found: Diagnosis, pending: set[int]) -> set[int]:
        """Return the ranks to end, so that others can go on, of a standstill that the test expects.

        None before the ranks have stood still for as long as the test says, unless no rank can get on.
        """
        now = time.monotonic()
        due = [each for each in self._expected if found.is_hopeless or now >= self._since + each.within]
        culprits = found.blame & pending
        if culprits == pending or not any(each.text in found.sentence for each in due):
            return set()
        self._causes |= dict.fromkeys(culprits, found.sentence)
        return set(culprits)

    def missed(self) -> tuple[str, ...]:
        """Return the texts of what was expected and has not happened, as far as the controller knows."""
        texts = dict.fromkeys(each.text for each in self._expected)
        return tuple(text for text in texts if not any(text in each.text for each in self.happened))

    def _is_expected(self, sentence: str) -> bool:
        return any(each.text in sentence for each in self._expected)
