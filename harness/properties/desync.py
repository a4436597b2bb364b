"""What is said of ranks that are out of step in a property test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.properties.messages import EXAMPLE, LEFT, VICTIM_OF_AN_EXAMPLE, Drawn
from harness.protocol import Vote

END = "the end of a property"
"""Where ranks wait for each other before they leave it."""

_DRAW = (
    "\nEvery rank must draw the same. Draw on all ranks, in no branch and with no bounds or filter that "
    "depend on the rank; what is to differ between ranks take with world.pick(...) from what all have drawn"
)
_DECIDE = (
    "\nassume(), skips, filters and health checks must say the same on all ranks: decide on what all ranks "
    "share, a value that was gathered, say"
)


class OutOfStep(BaseException):
    """Ranks have drawn or decided differently. No example: search and shrinking make no sense any more.

    Not an `Exception`, which Hypothesis would take for a failing example and try to shrink.
    """


class LeftAlone(OutOfStep):
    """Another rank has ended the test: what goes on here means nothing."""


def tell_places(votes: Sequence[Vote]) -> str:
    """Say where each rank is, as they are not at the same example."""
    ended = [str(rank) for rank, vote in enumerate(votes) if vote.outcome == "ended" or vote.case == END]
    if ended:
        return f"{VICTIM_OF_AN_EXAMPLE}rank {', '.join(ended)} {LEFT}"
    where = "; ".join(f"rank {rank} at [{vote.case}]" for rank, vote in enumerate(votes))
    return f"ranks disagree on what comes next: {where}"


def tell_runs(case: str, facts: Sequence[Mapping[str, str]]) -> str:
    """Say in what ranks differ as they begin a property test; `facts` are those of each rank, by name."""
    name = next((name for name in facts[0] if len({each[name] for each in facts}) > 1), "seed")
    said = "; ".join(f"rank {rank} has the {name} {each[name]}" for rank, each in enumerate(facts))
    return f"ranks begin [{case}] differently: {said}.\nSeed and settings must be the same on all ranks"


def tell_outcomes(votes: Sequence[Vote]) -> str:
    """Say how each rank fared with an example that some did not accept."""
    words = "; ".join(f"rank {rank} {_word(vote)}" for rank, vote in enumerate(votes))
    return f"ranks disagree in {votes[0].case}: {words}.{_DECIDE}"


def tell_draws(case: str, drawn: Sequence[Sequence[Drawn]]) -> str:
    """Say which draw of an example was the first that ranks did not share."""
    number = next(
        (
            place
            for place in range(max(map(len, drawn)))
            if len({draws[place].what if place < len(draws) else "" for draws in drawn}) > 1
        ),
        None,
    )
    if number is None:  # their bounds differ in what is not written out
        return f"ranks have drawn differently in {case}.{_DRAW}"
    words = "; ".join(f"rank {rank} drew {_draw_word(draws, number)}" for rank, draws in enumerate(drawn))
    return f"ranks have drawn differently in {case}: {words}.{_DRAW}"


def _draw_word(draws: Sequence[Drawn], number: int) -> str:
    if number >= len(draws):
        return "nothing more"
    draw = draws[number]
    return f"{draw.what} for {draw.where}" if draw.where else draw.what


def tell_victim(culprits: Sequence[int]) -> str:
    return f"{VICTIM_OF_AN_EXAMPLE}rank {', '.join(map(str, culprits))}"


def _word(vote: Vote) -> str:
    return f"{vote.outcome} it ({vote.reason})" if vote.reason else f"{vote.outcome} it"


def example(number: int) -> str:
    return f"{EXAMPLE}{number}"
