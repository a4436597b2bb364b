"""The standing of ranks: what they find out about each other between two tests, in memory that they share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lockstep.protocol import Finished
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from lockstep.standing import Standing, all_go_on, create_standing, read_standing

PASSED = Finished(True, 3, 1, goes_on=True)
ENDS = {
    "both pass": ([PASSED, PASSED], True),
    "one does not": ([PASSED, Finished(True, 3, 1)], False),
    "one has begun another collective": ([PASSED, Finished(True, 4, 1, goes_on=True)], False),
    "one has made another group": ([PASSED, Finished(True, 3, 2, goes_on=True)], False),
    "both have lost their group": ([Finished(True, -1, 0, goes_on=True)] * 2, True),
}


@pytest.fixture
def specs(tmp_path: Path) -> list[RankSpec]:
    session = SessionSpec((), "/", (), (), {}, {}, captures=True, measures=False, debugged_rank=None)
    create_standing(str(tmp_path), 2)
    return [RankSpec(rank, WorldKey(2, "gloo", "cpu"), session, 0, str(tmp_path), "") for rank in (0, 1)]


@pytest.mark.parametrize("case", ENDS)
def test_ranks_and_controller_agree_whether_all_go_on(specs: list[RankSpec], case: str) -> None:
    ends, goes_on = ENDS[case]
    standings = [Standing(spec) for spec in specs]
    for standing, end in zip(standings, ends, strict=True):
        standing.end_item(end, 0)
    assert [standing.all_go_on() for standing in standings] == [goes_on, goes_on]
    assert all_go_on(ends) == goes_on


def test_a_rank_waits_for_the_slowest(specs: list[RankSpec]) -> None:
    first, second = map(Standing, specs)
    for _ in range(2):  # the words of both parities
        found: list[Any] = []
        first.end_item(PASSED, 0)
        waits = threading.Thread(target=lambda: found.append(first.all_go_on()))  # noqa: B023
        waits.start()
        waits.join(0.2)
        assert found == []
        assert not first.have_all_gone_on()
        second.end_item(PASSED, 0)
        waits.join(30)
        assert found == [True]


def test_a_rank_that_is_slow_to_look_finds_what_it_would_have_found(specs: list[RankSpec]) -> None:
    first, second = map(Standing, specs)
    first.end_item(PASSED, 0)
    second.end_item(Finished(True, 3, 1), 0)
    assert not first.all_go_on()
    first.end_item(PASSED, 0)  # of the next item, which the controller has ordered after the report
    assert not second.all_go_on()


def test_the_controller_reads_how_far_a_rank_has_come(specs: list[RankSpec]) -> None:
    standing = Standing(specs[1])
    assert read_standing(specs[1]) == (0, 0)
    standing.end_item(PASSED, 70)
    standing.record_phases_over(2)
    assert read_standing(specs[1]) == (2, 70)
    assert read_standing(specs[0]) == (0, 0)
    Path(specs[0].directory, "standing").unlink()
    assert read_standing(specs[1]) == (0, 0)
