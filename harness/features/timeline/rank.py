"""Flight records of all tests, which ranks send under `--timeline`. Runs inside a rank."""

from __future__ import annotations

import pytest

from lockstep.features.timeline import FEATURE
from lockstep.hookspecs import Ending
from lockstep.rank.status import StatusReader


class FlightRecords:
    """Sends the calls of each test at its end, with stacks from its begin on."""

    def __init__(self, status: StatusReader) -> None:
        self._status = status

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._status.keep_stacks()

    def pytest_ranks_finished(self, ending: Ending) -> None:
        ending.parts[FEATURE] = self._status.record()
