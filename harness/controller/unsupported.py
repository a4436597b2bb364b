"""Features of other plugins that do not work on ranks, each with a sentence that says so.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import pytest

from lockstep.controller.pytest_internals import fixture_of

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


def refuse_fixtures(item: pytest.Item) -> str:
    """Say why an item cannot run on ranks for one of its fixtures; "" if it can."""
    for name in getattr(item, "fixturenames", ()):
        function = fixture_of(item, name)
        place = getattr(function, "__module__", ""), getattr(function, "__name__", "")
        why = _REFUSED.get(place, "")
        if why and not (why is _BENCHMARK and item.config.getoption("benchmark_disable", False)):
            return why.format(name=name)
    return ""


def note_on_snapshots(config: pytest.Config) -> str:
    """Say what ranks do not do of what `--inline-snapshot` asks for; "" where it asks for nothing."""
    wanted = set((getattr(config.option, "inline_snapshot", None) or "").split(","))
    if not wanted & {"create", "fix", "fix-assert", "review", "trim", "update"}:
        return ""
    return (
        "inline-snapshot: snapshots in tests on ranks were compared, and not written: several processes "
        "would write the file. Write their values yourself, or create them in a test without ranks"
    )
