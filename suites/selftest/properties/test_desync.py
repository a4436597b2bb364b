"""The errors of ranks that are out of step in a property test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.features.properties.desync import END, OutOfStep, describe_draws
from lockstep.features.properties.examples import Examples
from lockstep.features.properties.messages import Drawn
from lockstep.protocol import TRIAL, Vote
from suites.selftest.properties.stand_ins import Peers, raising, with_result


def _out_of_step(tmp_path: Path, answer: Callable[[Vote], Vote], act: Callable[[Examples], object]) -> str:
    """Return what rank 0 of 2 raises where rank 1 answers its votes so."""
    rank = Mock(agree=lambda vote, abort_after: (vote, answer(vote)))
    rank.spec.path_of.return_value, rank.spec.rank = str(tmp_path / "running"), 0
    with pytest.raises(OutOfStep) as raised:
        act(Examples(rank, records=False))
    return f"{raised.type.__name__}: {raised.value}"


def test_the_setting_in_which_ranks_differ_is_named(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return replace(vote, more={"test": "x", "seed": "7"} if isinstance(vote.more, dict) else "another")

    assert _out_of_step(tmp_path, answer, lambda each: each.begin_run("f", {"test": "x", "seed": "5"})) == (
        "OutOfStep: ranks begin [the property f] differently: rank 0 has the seed 5; rank 1 has the seed 7.\n"
        "Seed and settings must be the same on all ranks"
    )


def test_ranks_at_different_places_are_named(tmp_path: Path) -> None:
    assert _out_of_step(
        tmp_path, lambda vote: replace(vote, case="the property g"), lambda each: each.begin_run("f", {})
    ) == (
        "OutOfStep: ranks disagree on what comes next: rank 0 at [the property f]; rank 1 at [the property g]"
    )


@pytest.mark.parametrize("change", [{"outcome": "ended"}, {"case": END}], ids=["test", "property"])
def test_a_rank_that_has_ended_the_test_is_named(tmp_path: Path, change: dict[str, str]) -> None:
    assert _out_of_step(
        tmp_path, lambda vote: replace(vote, **change), lambda each: each.begin_run("f", {})
    ) == ("EndedByOthers: this example failed on another rank: rank 1 had already ended the test")


def test_a_property_may_end_after_another_rank_has_ended_it(tmp_path: Path) -> None:
    votes: list[Vote] = []

    def agree(vote: Vote, abort_after: float) -> tuple[Vote, ...]:
        votes.append(vote)
        return vote, replace(vote, outcome="ended")

    rank = Mock(agree=agree)
    rank.spec.path_of.return_value = str(tmp_path / "running")
    Examples(rank, records=False).end_run()
    assert [(vote.case, vote.outcome, vote.renews_deadline) for vote in votes] == [(END, "ended it", True)]


def test_ranks_that_decide_differently_are_out_of_step(tmp_path: Path) -> None:
    peers = Peers(tmp_path, lambda vote: replace(vote, outcome="rejected", reason="odd"))
    with pytest.raises(OutOfStep, match=r"rank 0 passed it; rank 1 rejected it \(odd\)"):
        peers.run(print)


def test_ranks_that_draw_differently_are_out_of_step(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        if vote.case.startswith(TRIAL):
            return with_result(vote, "passed", choices=b"another")
        return replace(vote, more=[Drawn("5 (integer of 0 to 9)", "")])

    peers = Peers(tmp_path, answer)
    with pytest.raises(OutOfStep, match=r"rank 0 drew 4 \(integer of 0 to 9\); rank 1 drew 5 \(integer"):
        peers.run(lambda data: data.draw_integer(0, 9), 4)
    assert [vote.case for vote in peers.votes] == [f"{TRIAL}1", f"the draws of {TRIAL}1"]


def test_a_broken_connection_where_another_rank_left_early_is_out_of_step(tmp_path: Path) -> None:
    def answer(vote: Vote) -> Vote:
        return replace(with_result(vote, "skipped", origin=None, lost_connection=False), reason="no GPU")

    peers = Peers(tmp_path, lambda vote: answer(vote) if vote.case == f"{TRIAL}1" else vote)
    with pytest.raises(OutOfStep, match=r"rank 0 failed it; rank 1 skipped it \(no GPU\)"):
        peers.run(raising(RuntimeError("[gloo] Connection closed by peer")))


def test_draws_in_bounds_that_read_alike_are_named_by_their_example() -> None:
    drawn = [[Drawn("0.5 (float)", "x")], [Drawn("0.5 (float)", "x")]]
    assert describe_draws("example 3", drawn).startswith("ranks drew with different bounds in example 3.\n")


def test_a_rank_that_drew_less_is_named() -> None:
    drawn = [[Drawn("1", "x"), Drawn("2", "")], [Drawn("1", "x")], [Drawn("1", "y"), Drawn("2", "y")]]
    assert describe_draws("example 3", drawn).startswith(
        "ranks drew different values in example 3: "
        "rank 0 drew 2; rank 1 drew nothing more; rank 2 drew 2 for y."
    )
