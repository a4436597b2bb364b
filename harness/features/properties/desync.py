"""Ranks that are out of step in a property test: the exceptions, and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lockstep.features.properties.messages import Drawn
from lockstep.protocol import HAS_ENDED, VICTIM_OF_A_TRIAL, Vote

END = "the end of a property"
"""Case at which ranks wait for each other before they leave a property."""

_DRAW = (
    "\nEvery rank must make the same draws: in no branch, and with no bounds or filter, that depend on the "
    "rank. Draw the values of all ranks on every rank, and select this rank's with world.pick(...)"
)
_DECIDE = (
    "\nassume(), skips, filters and health checks must decide alike on all ranks: base them on what all "
    "ranks share, a gathered value for example"
)


class OutOfStep(BaseException):
    """Ranks drew or decided differently, so search and shrinking cannot continue.

    Not an `Exception`, which Hypothesis would take for a failing example and try to shrink.
    """


class EndedByOthers(OutOfStep):
    """Another rank has ended the test, so results of this one mean nothing from here on."""


def describe_places(votes: Sequence[Vote]) -> str:
    """Say where each rank is, as they are not at the same example."""
    ended = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "ended" or vote.case == END]
    if ended:
        return f"{VICTIM_OF_A_TRIAL}rank {', '.join(ended)} {HAS_ENDED}"
    where = "; ".join(f"rank {rank} at [{vote.case}]" for rank, vote in enumerate(votes))
    return f"ranks disagree on what comes next: {where}"


def describe_settings(case: str, facts: Sequence[Mapping[str, str]]) -> str:
    """Say in which setting ranks differ as they begin a property; `facts` are the settings of each rank."""
    name = next((name for name in facts[0] if len({each[name] for each in facts}) > 1), "seed")
    words = "; ".join(f"rank {rank} has the {name} {each[name]}" for rank, each in enumerate(facts))
    return f"ranks begin [{case}] differently: {words}.\nSeed and settings must be the same on all ranks"


def describe_outcomes(votes: Sequence[Vote]) -> str:
    """Say how an example ended on each rank, as some did not accept it."""
    reasons = [f" ({vote.reason})" if vote.reason else "" for vote in votes]
    words = "; ".join(f"rank {rank} {vote.outcome} it{reasons[rank]}" for rank, vote in enumerate(votes))
    return f"ranks disagree in {votes[0].case}: {words}.{_DECIDE}"


def describe_draws(case: str, drawn: Sequence[Sequence[Drawn]]) -> str:
    """Name the first draw of an example that ranks did not share."""
    for number in range(max(map(len, drawn))):
        if len({draws[number].value if number < len(draws) else "" for draws in drawn}) > 1:
            words = "; ".join(
                f"rank {rank} drew {_draw_word(draws, number)}" for rank, draws in enumerate(drawn)
            )
            return f"ranks drew different values in {case}: {words}.{_DRAW}"
    return f"ranks drew with different bounds in {case}.{_DRAW}"  # bounds that no message writes out


def _draw_word(draws: Sequence[Drawn], number: int) -> str:
    if number >= len(draws):
        return "nothing more"
    draw = draws[number]
    return f"{draw.value} for {draw.where}" if draw.where else draw.value
