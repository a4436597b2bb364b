"""Follows a test by what its ranks answer to probes. Runs in the controller; must not import torch."""

from __future__ import annotations

import os
import time

import pytest

from lockstep.features.progress.display import ProgressDisplay
from lockstep.features.progress.glance import Places
from lockstep.protocol import Progress, RankStatus
from lockstep.world.item_run import ItemRun


class FollowedRuns:
    """Shows how far the test has come that ranks run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._places: Places | None = None
        self._display: ProgressDisplay | None = None

    def pytest_ranks_run_begins(self) -> None:
        self._places = None

    def pytest_ranks_answer(self, rank: int, answer: RankStatus | Progress) -> None:
        self._places = self._places or Places()
        self._places.note(rank, answer, time.monotonic())

    def pytest_ranks_probe(self, run: ItemRun, silent: set[int]) -> bool:
        """Show how far the test has come; return whether to ask its ranks where they are."""
        now, self._places = time.monotonic(), self._places or Places()
        self._places.note_silent(silent, now)
        if self._display is None:  # what other plugins do of the terminal is known by now
            self._display = ProgressDisplay(self._config, os.environ)
        return self._display.look(self._places.glance(run, now))

    def pytest_ranks_run_ended(self) -> None:
        if self._display is not None:
            self._display.end()
