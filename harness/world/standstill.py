"""Probes of the ranks of an item, and the diagnoses of ranks that wait for each other.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.protocol import Probe, Progress, RankStatus
from lockstep.world.diagnosis import Diagnosis, find_mismatch
from lockstep.world.handle import RankHandle

PROBE_EVERY = 0.3
"""Seconds between looks at ranks that have nothing to say."""


class Probes:
    """Probes of ranks.

    Attributes:
        answers: The answers since the last probe.
        unanswered: Ranks that have been sent a probe and have not answered it.
        due: The moment of the next probe, monotonic.
    """

    def __init__(self, handles: Sequence[RankHandle]) -> None:
        self.answers: dict[int, RankStatus] = {}
        self.unanswered: set[int] = set()
        self.postpone()
        self._handles = handles

    def postpone(self) -> None:
        self.due = time.monotonic() + PROBE_EVERY

    def take(self, rank: int, answer: RankStatus | Progress) -> None:
        self.unanswered.discard(rank)
        if isinstance(answer, RankStatus):
            self.answers[rank] = answer

    def send(self, names_place: bool) -> None:
        """Send the next probe to each rank that has answered the last one."""
        self.answers.clear()
        self.postpone()
        for handle in self._handles:
            if handle.rank not in self.unanswered:  # a write to a full wire would wait until the rank reads
                self.unanswered.add(handle.rank)
                handle.send(Probe(names_place=names_place))


class Standstill:
    """The diagnoses of an item and of its cases; until one is certain, the suspicion of one.

    Attributes:
        diagnosis: What is wrong between the ranks of the item.
        cases: The same of cases of `run_subtests`, each of which ends alone.
        aborted: The case that was ended last, until all ranks have left it.
    """

    def __init__(self) -> None:
        self.diagnosis: Diagnosis | None = None
        self.cases: dict[str, Diagnosis] = {}
        self.aborted = ""
        self._suspicion: Diagnosis | None = None
        self._failed: dict[str, dict[int, RankStatus]] = {}

    def confirm(self, found: Diagnosis | None) -> bool:
        """Return whether it is found for the second time in a row: a rank may have been met on its way."""
        before, self._suspicion = self._suspicion, found
        return found is not None and found == before

    def forget_suspicion(self) -> None:
        self._suspicion = None

    def abort(self, case: str, found: Diagnosis) -> bool:
        """Note that a case is ended, so that the others can run; return False if only the item can be."""
        if not case or case in self.cases:
            self.diagnosis = found
            return False
        self.cases[case] = found
        self.aborted = case
        return True

    def note_failure(self, case: str, rank: int, status: RankStatus) -> None:
        """Note what a rank that has failed in a case had begun then."""
        self._failed.setdefault(case, {})[rank] = status

    def compare_failed_cases(self, size: int) -> None:
        """Find cases that failed as ranks called other collectives than others."""
        for case, statuses in self._failed.items():
            found = find_mismatch(statuses, size, include_ended=True)
            if found is not None:
                self.cases.setdefault(case, found)
