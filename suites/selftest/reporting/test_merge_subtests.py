"""Unit tests of the merge of reports of subtests."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.protocol import OF_RANKS, TRIAL
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, RankOutcome
from suites.selftest.reporting.merged import LOST, Ranks, made, stuck

Subtest = tuple[str, pytest.TestReport]


def of_subtest(name: str, outcome: Any = "passed", text: Any = None, **fields: Any) -> Subtest:
    return name, made("call", outcome, text, **fields)


def with_subtests(ranks: Ranks, number: int, *subtests: Subtest, **fields: Any) -> RankOutcome:
    """Return a rank that set up, ran these subtests, and passed."""
    phases = [made(when, "passed", None) for when in ("setup", "call", "teardown")]
    outcome = ranks.of(number, [phases[0], *(report for _, report in subtests), *phases[1:]], **fields)
    for (name, _), data in zip(subtests, outcome.reports[1:], strict=False):
        kind = {"$report_type": "SubtestReport", "_report_type": "SubTestReport"}
        data |= {**kind, "_subtest.context": {"msg": name, "kwargs": {"text": "'x'"}}}
    return outcome


def subtests_of(reports: list[pytest.TestReport]) -> list[Any]:
    return [report for report in reports if type(report) is not pytest.TestReport]


def test_a_subtest_is_merged_and_its_test_fails_with_it(ranks: Ranks) -> None:
    bad = of_subtest("n=1, m=2", "failed", "E   ValueError: no")
    outcomes = with_subtests(ranks, 0, of_subtest("n=1, m=2")), with_subtests(ranks, 1, bad)
    reports = ranks.merge(*outcomes)
    assert [(report.when, report.outcome) for report in reports] == [
        ("setup", "passed"),
        ("call", "failed"),
        ("call", "failed"),
        ("teardown", "passed"),
    ]
    (subtest,) = subtests_of(reports)
    assert getattr(subtest, OF_RANKS) is True
    assert subtest.context.kwargs == {"text": "'x'"}
    lines = subtest.longreprtext.splitlines()
    assert lines[:2] == ["rank 1 of 2 failed", "rank 0: passed"]
    assert dict(subtest.user_properties)["rerun"] == "pytest a.py --subtest n=1,m=2"
    assert reports[2].longrepr == "contains 1 failed subtest"
    both = with_subtests(ranks, 0, bad, of_subtest("x", "failed", "E  no")), with_subtests(ranks, 1, bad)
    assert ranks.merge(*both)[3].longrepr == "contains 2 failed subtests"
    ranks.item.fixturenames = ()
    ranks.item.config.options["subtest"] = ["n=1"]
    (subtest,) = subtests_of(ranks.merge(*outcomes))
    assert dict(subtest.user_properties)["rerun"] == "pytest a.py"


def test_subtests_of_one_name_are_apart_by_their_order(ranks: Ranks) -> None:
    first = [of_subtest("a", "failed", "E   ValueError: one"), of_subtest("a")]
    second = [of_subtest("a"), of_subtest("a", "failed", "E   ValueError: two")]
    merged = subtests_of(ranks.merge(with_subtests(ranks, 0, *first), with_subtests(ranks, 1, *second)))
    assert [report.longreprtext.splitlines()[0] for report in merged] == [
        "rank 0 of 2 failed",
        "rank 1 of 2 failed",
    ]


def test_ranks_that_disagree_on_a_subtest_fail_it(ranks: Ranks) -> None:
    def heads(*subtests: list[Subtest]) -> list[str]:
        outcomes = [with_subtests(ranks, number, *each) for number, each in enumerate(subtests)]
        (subtest,) = subtests_of(ranks.merge(*outcomes))
        return subtest.longreprtext.splitlines() if subtest.failed else [subtest.outcome]

    passed, skipped = [of_subtest("a")], [of_subtest("a", "skipped", "why")]
    assert heads(passed, skipped, passed)[:3] == [
        "rank 1 of 3 skipped it and others did not: ranks disagree",
        "rank 0: passed",
        "rank 2: passed",
    ]
    assert heads(skipped, [], skipped)[:3] == [
        "rank 1 of 3 did not reach it and others did: ranks disagree",
        "rank 0: skipped",
        "rank 2: skipped",
    ]
    assert heads(skipped, skipped) == ["skipped"]
    failed = [of_subtest("a", "failed", "E   ValueError: no")]
    assert heads(passed, failed, skipped)[:3] == ["rank 1 of 3 failed", "rank 0: passed", "rank 2: skipped"]


def test_an_expected_failure_of_a_subtest_is_that_of_all_ranks(ranks: Ranks) -> None:
    expected = of_subtest("a", "skipped", None, wasxfail="why")
    victim = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    (merged,) = subtests_of(ranks.merge(with_subtests(ranks, 0, expected), with_subtests(ranks, 1, victim)))
    assert (merged.outcome, merged.wasxfail) == ("skipped", "why")
    other = of_subtest("a", "failed", "E   ValueError: no")
    (merged,) = subtests_of(ranks.merge(with_subtests(ranks, 0, expected), with_subtests(ranks, 1, other)))
    assert merged.longreprtext.splitlines()[0] == "rank 1 of 2 failed"


def test_a_death_in_a_subtest_is_a_cause_of_its_failure(ranks: Ranks) -> None:
    lost = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    fate = Died(exitcode=-9, output="", at=1.5, phases_over=1)
    dead = with_subtests(ranks, 1, fate=fate)
    after = with_subtests(ranks, 1, of_subtest("a"), fate=fate)
    for each in (dead, after):
        del each.reports[-2:]
    heads = [
        subtests_of(ranks.merge(with_subtests(ranks, 0, lost), each))[0].longreprtext.splitlines()[0]
        for each in (dead, after)
    ]
    assert heads == ["rank 1 of 2 died: SIGKILL", "rank 0 of 2 failed"]


def test_a_diagnosis_is_of_its_subtest_or_of_the_last_trial(ranks: Ranks) -> None:
    names = ("a", f"{TRIAL}1", f"{TRIAL}2")
    blame = {name: Diagnosis(f"in {name}", frozenset({1}), True) for name in names}
    lost = of_subtest("a", "failed", f"E   RuntimeError: {LOST}")
    victims = [with_subtests(ranks, number, lost) for number in (0, 1)]
    (merged,) = subtests_of(ranks.merge(*victims, diagnoses=blame))
    assert merged.longreprtext.splitlines()[0] == "in a"
    assert ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnoses=blame)[0] == f"in {TRIAL}2"
    given = Diagnosis("in the test", frozenset({1}), True)
    lines = ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnosis=given, diagnoses=blame)
    assert lines[0] == "in the test"
    of_cases = {"a": blame["a"]}
    assert ranks.failure(stuck(ranks, 0), stuck(ranks, 1), diagnoses=of_cases)[0].startswith("rank 0 of 2 ")
