"""What ranks say of a property test beside passed and failed: the example, the seed, the statistics.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from harness.properties.told import EXAMPLE, NOTES, SEED, STATISTICS
from harness.world.diagnosis import Diagnosis
from harness.world.outcome import ItemOutcome


@dataclass(frozen=True, slots=True)
class PropertyWords:
    """What was said of a property test, by the first rank that said it."""

    example: str
    """As Hypothesis tells it, with the line that reproduces it; empty if none failed."""
    rerun: str
    """What the command that runs the test again needs in addition."""
    statistics: str

    def add_statistics(self, merged: Sequence[pytest.TestReport]) -> None:
        """Put the statistics where Hypothesis's plugin looks for them, once."""
        for report in merged:
            vars(report).pop(STATISTICS, None)
        if self.statistics and merged:
            vars(merged[-1])[STATISTICS] = self.statistics


def read_properties(outcome: ItemOutcome) -> PropertyWords:
    """Find what the reports of ranks tell of a property test."""
    found: dict[str, str] = {}
    for report in (report for rank in outcome.ranks for report in rank.reports):
        for name in (NOTES, SEED, STATISTICS):
            if name in report:
                found.setdefault(name, str(report[name]))
    seed = found.get(SEED, "")
    rerun = f" --hypothesis-seed={seed}" if seed else ""
    return PropertyWords(found.get(NOTES, ""), rerun, found.get(STATISTICS, ""))


def last_of_examples(outcome: ItemOutcome) -> Diagnosis | None:
    """Return what was wrong between ranks in the last example that all of them were stuck in."""
    points = [point for point in outcome.diagnoses if point.startswith(EXAMPLE)]
    return outcome.diagnoses[points[-1]] if points else None
