"""The sweeps of a rank's session: a plugin that knows which other ranks are lost. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.sweep.messages import FEATURE, Lost
from lockstep.features.sweep.rank import SweepFailed
from lockstep.features.sweep.sweep import Sweep
from lockstep.protocol import RERUN_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Generator

    from lockstep.protocol import Part
    from lockstep.rank.session import RankSession

__tracebackhide__ = True  # the frames of hooks say nothing in a test's traceback


class SweepsOfRank:
    """Notes which ranks are lost, and adds to a failure the option that runs its smallest point again."""

    def __init__(self) -> None:
        self.lost_peers = LostPeers()

    def pytest_ranks_part(self, part: Part) -> None:
        if part.feature == FEATURE and isinstance(part.data, Lost):
            self.lost_peers.note(part.data.rank)

    def pytest_ranks_regrouped(self) -> None:
        self.lost_peers.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        error = call.excinfo and call.excinfo.value
        if isinstance(error, SweepFailed) and error.point is not None:
            vars(report)[RERUN_OPTIONS] = f" --sweep-point '{error.point}'"
        return report


def sweep_of(session: RankSession, config: pytest.Config, part: tuple[int, int]) -> Sweep:
    """Return the value of the fixture `sweep`, of one test."""
    plugin: Any = config.pluginmanager.get_plugin("harness-sweeps")
    if plugin is None:
        plugin = SweepsOfRank()
        config.pluginmanager.register(plugin, "harness-sweeps")
    return Sweep(session, plugin.lost_peers, part)
