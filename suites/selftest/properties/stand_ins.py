"""Stand-ins for the ranks, votes and examples of property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from hypothesis.internal.conjecture.data import ConjectureData

from lockstep.features.properties.attempt import Attempt
from lockstep.features.properties.crashed import CrashGuard
from lockstep.features.properties.examples import Examples
from lockstep.features.properties.messages import (
    ExampleResult,
    Origin,
    RunningExample,
    RunningExampleFile,
    Search,
    read_running_example,
)
from lockstep.protocol import Vote

ORIGIN = Origin("all of it", "ValueError", "elsewhere.py", 3)


def example_of(choices: bytes, number: int = 1) -> RunningExample:
    return RunningExample(1, number, choices, True)


def begin_attempt(tmp_path: Path, *choices: Any, engine: Any = None) -> Attempt:
    running = RunningExampleFile(str(tmp_path / "running"))
    running.begin(1, 1)
    return Attempt(ConjectureData.for_choices(choices, observer=engine), running, CrashGuard(running))


def raising(error: BaseException) -> Callable[..., object]:
    def run(*_: object) -> object:
        raise error

    return run


class Peers:
    """Votes of two ranks, of which this process is one; the other answers each vote of this one."""

    def __init__(self, tmp_path: Path, answer: Callable[[Vote], Vote], *, rank: int = 0) -> None:
        self.votes: list[Vote] = []
        self.waits: list[float | None] = []
        self.path = str(tmp_path / "running")
        self.in_vote: list[RunningExample | None] = []

        def agree(vote: Vote, abort_after: float | None) -> tuple[Vote, ...]:
            self.votes.append(vote)
            self.waits.append(abort_after)
            self.in_vote.append(read_running_example(self.path))
            return (vote, answer(vote)) if rank == 0 else (answer(vote), vote)

        self.rank = Mock(agree=agree)
        self.rank.spec.path_of.return_value, self.rank.spec.rank = self.path, rank
        self.rank.group.is_aborted = False
        self.examples = Examples(self.rank, records=False)
        self.examples.begin_item(Search())

    def run(self, act: Callable[[ConjectureData], object], *choices: Any, engine: Any = None) -> object:
        self.data = ConjectureData.for_choices(choices, observer=engine)
        return self.examples.run(lambda data, _: act(data), self.data, print)


def same_vote(vote: Vote) -> Vote:
    return vote


def with_result(vote: Vote, outcome: str, **changes: Any) -> Vote:
    """Return the vote of a rank in the same example with another outcome and result."""
    result = replace(ExampleResult.unpack(vote.more), **changes)
    return replace(vote, outcome=outcome, more=result.pack())


def fail(_: ConjectureData) -> None:
    raise ValueError("wrong")
