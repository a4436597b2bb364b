"""Unit tests of what the end of a run says of subtests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.protocol import OF_RANKS
from lockstep.reporting.summary import SUBTESTS, _unmatched, count_subtests
from lockstep.subtests import NO_CASE_OF


def test_subtests_of_ranks_that_passed_are_counted() -> None:
    def report(outcome: str = "passed", **fields: Any) -> Any:
        given: Any = outcome
        return pytest.TestReport("a", ("a", 1, "a"), {}, given, None, "call", **fields)

    plain, failed = report(), report("failed", context=1)
    subtest, expected = report(context=1), report(context=1, wasxfail="x")
    setattr(subtest, OF_RANKS, True)
    others = report(context=1)
    stats: dict[str, list[object]] = {"": [plain, failed, others, expected, "text"]}
    count_subtests(stats)
    assert stats == {"": [plain, failed, others, expected, "text"]}
    stats[""].append(subtest)
    count_subtests(stats)
    assert stats == {"": [plain, failed, expected, "text"], SUBTESTS: [others, subtest]}
    count_subtests(stats)
    assert len(stats[SUBTESTS]) == 2


def test_a_choice_of_cases_that_no_test_has_is_the_end_of_a_run() -> None:
    def unmatched(subtest: str = "x", **stats: Any) -> list[str]:
        config = SimpleNamespace(getoption=lambda name: subtest)
        return _unmatched(SimpleNamespace(config=config, stats=stats))  # type: ignore[arg-type]

    reports = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {NO_CASE_OF} {each}")) for each in "bab"]
    reports += [SimpleNamespace(longrepr=("a.py", 1, "Skipped: other")), SimpleNamespace(longrepr="text")]
    assert unmatched(skipped=reports, warnings=[1]) == [f"{NO_CASE_OF} a", f"{NO_CASE_OF} b"]
    assert unmatched(skipped=reports, passed=[1]) == []
    assert unmatched("", skipped=reports) == []
