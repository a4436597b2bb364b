"""Causes and consequences where several ranks failed."""

from lockstep.reporting.problems import Problem, find_causes


def test_a_mismatch_beside_a_failure_of_another_kind_is_its_consequence() -> None:
    mismatch = Problem(0, 1.0, "failed", is_mismatch=True)
    failure = Problem(1, 2.0, "failed")
    assert find_causes([mismatch, failure]) == [failure]


def test_a_mismatch_that_all_ranks_report_is_the_cause() -> None:
    mismatches = [Problem(rank, 1.0, "failed", is_mismatch=True) for rank in (0, 1)]
    assert find_causes(mismatches) == mismatches
