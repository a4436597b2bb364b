"""The statistics of property tests, which the controller takes from one rank."""

from __future__ import annotations

from types import SimpleNamespace

from lockstep.features.properties.messages import STATISTICS
from lockstep.features.properties.plugin import Searches
from lockstep.world.outcome import ItemOutcome, RankOutcome


def test_statistics_are_those_of_one_report_of_one_rank() -> None:
    first, last, stale = (SimpleNamespace(name=name, **{STATISTICS: "old"}) for name in "abc")
    ranks = (RankOutcome(0, [{}]), RankOutcome(1, [{}, {STATISTICS: "of rank 1"}]))
    Searches().pytest_ranks_reported(ItemOutcome(ranks, 1.0, False, 1.0), [first, last])  # type: ignore[list-item]
    assert (vars(first), vars(last)) == ({"name": "a"}, {"name": "b", STATISTICS: "of rank 1"})
    Searches().pytest_ranks_reported(ItemOutcome(ranks[:1], 1.0, False, 1.0), [stale])  # type: ignore[list-item]
    assert vars(stale) == {"name": "c"}
