"""The guard that fails an example where it has ended a world before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis.internal.conjecture.data import ConjectureData

from lockstep.features.properties.attempt import Attempt
from lockstep.features.properties.crashed import CrashGuard, RankCrashed
from lockstep.features.properties.messages import CrashedExample, RunningExample, RunningExampleFile
from suites.selftest.properties.stand_ins import example_of


def test_an_example_that_ended_a_world_fails_where_it_did(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    running.begin(1, 1)
    guard.check()
    assert not guard.is_expected
    crashed = tuple(
        CrashedExample(RunningExample(1, 1, each, False), f"how {each!r}") for each in (b"a", b"ab")
    )
    guard.begin_item(crashed)
    assert guard.is_expected
    guard.check()
    for choices, index in ((b"a", 0), (b"b", 1)):
        running.draw(choices)
        with pytest.raises(RankCrashed, match=f"how b'{'ab'[: index + 1]}'") as failure:
            guard.check()
        assert (failure.value.index, guard.has_met_last) == (index, index == 1)
    running.draw(b"c")
    guard.check()
    assert guard.has_met_last
    guard.begin_item(())
    assert not guard.has_met_last


def test_a_body_is_checked_as_it_begins(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    assert not guard.has_met_last
    body = guard.wrap_body(lambda *given, **named: (given, named))
    running.begin(1, 1)
    assert body(1, two=2) == ((1,), {"two": 2})
    assert running.now().is_in_body
    guard.begin_item((CrashedExample(RunningExample(1, 1, b"", True), "how"),))
    running.begin(1, 1)
    with pytest.raises(RankCrashed, match="how"):
        body()


def test_draws_are_checked_where_an_example_is_expected_to_fail(tmp_path: Path) -> None:
    running = RunningExampleFile(str(tmp_path / "running"))
    guard = CrashGuard(running)
    checks: list[int] = []
    guard.check = lambda: checks.append(1)  # type: ignore[method-assign]
    for crashed in ((), (CrashedExample(example_of(b"a"), "how"),)):
        guard.begin_item(crashed)
        data = ConjectureData.for_choices([4, 5])
        Attempt(data, running, guard)
        data.draw_integer(0, 9)
        data.draw_integer(0, 9)
        assert len(checks) == 2 * len(crashed)
