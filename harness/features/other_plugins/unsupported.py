"""Features of other plugins that do not work on ranks, each with a sentence that says so.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import pytest

from lockstep.controller.pytest_internals import fixture_of
from lockstep.controller.requests import Refusal

_BENCHMARK = (
    "the fixture `{name}` of pytest-benchmark does not work on ranks: each would choose its own number of "
    "rounds, and ranks would call their collectives unequally often. Run with --benchmark-disable, which "
    "calls the function once, or time it yourself and record it with `record_property`"
)
_SYRUPY = (
    "the fixture `{name}` of syrupy does not work on ranks: its snapshots are written and counted by one "
    "process. Compare with a value in the test, with inline-snapshot, or with pytest-regressions"
)
_REFUSED = {
    ("pytest_benchmark.plugin", "benchmark"): _BENCHMARK,
    ("pytest_benchmark.plugin", "benchmark_weave"): _BENCHMARK,
    ("syrupy", "snapshot"): _SYRUPY,
}
"""By module and name of the function."""


class Unsupported:
    """Refuses tests on ranks that use such a feature, or notes at the end of the run that they did not."""

    def __init__(self) -> None:
        self._has_ranks = False

    def pytest_ranks_request(self, item: pytest.Item) -> Refusal | None:
        for name in getattr(item, "fixturenames", ()):
            function = fixture_of(item, name)
            place = getattr(function, "__module__", ""), getattr(function, "__name__", "")
            why = _REFUSED.get(place, "")
            if why and not (why is _BENCHMARK and item.config.getoption("benchmark_disable", False)):
                return Refusal("failed", why.format(name=name))
        return None

    def pytest_ranks_session(self) -> None:
        self._has_ranks = True

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        wanted = set((getattr(config.option, "inline_snapshot", None) or "").split(","))
        if self._has_ranks and wanted & {"create", "fix", "fix-assert", "review", "trim", "update"}:
            terminalreporter.write_line(
                "inline-snapshot: snapshots in tests on ranks were compared, and not written: several "
                "processes would write the file. Write their values yourself, or create them in a test "
                "without ranks"
            )
