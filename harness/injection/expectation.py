"""A fault that a test expects, and what its survivors see of it. Inside a rank; imports torch."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import pytest
import torch.distributed as dist

from harness.protocol import (
    BROKEN_CONNECTION,
    Agreed,
    Expects,
    Happened,
    Struck,
    Vote,
)

__tracebackhide__ = True  # under pytest a failure points to the call

WITHIN = 5.0
"""Seconds for which ranks have to stand still, where one that hangs is expected."""
# What collectives raise that have no answer in time. Not a mismatch, which is an error of its own.
_LOST = re.compile(
    r"gloo.*tim(ed out|eout)|monitoredBarrier|\bCollectiveTimeout\b", re.IGNORECASE | re.DOTALL
)


class ExpectingRank(Protocol):
    """The part of a rank that faults and expectations need."""

    def send(self, message: Struck | Expects) -> None: ...
    def meet(self, vote: Vote, abort_after: float | None = None) -> Agreed: ...
    def abort(self) -> None: ...


class Expectation:
    """A context in which a fault is expected: what survivors see of it is no failure.

    All ranks enter it, before the fault; at its end all that are left meet. The error of a collective that
    has lost another rank is caught there, and so is the exception that was expected; others are not.

    Attributes:
        error: the error that was caught on this rank, None if there was none.
        seconds: from the fault to that error, None if there was none.
        cause: what has happened, in the words of a report; "" before the end of the context.
    """

    def __init__(self, rank: ExpectingRank, number: int, text: str, within: float) -> None:
        self.error: Exception | None = None
        self.seconds: float | None = None
        self.cause = ""
        self._rank, self._number = rank, number
        self._text, self._within = text, within

    def __enter__(self) -> Self:
        self._rank.send(Expects(self._text, self._within))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        at = time.time()
        if error is not None and (not isinstance(error, Exception) or isinstance(error, AssertionError)):
            return False
        how = "ran through" if error is None else "lost others" if is_lost(error) else "failed"
        if error is not None:
            self._rank.abort()  # frees the ranks that wait for this one
        case = f"faults.expect({self._text!r})"
        answer = self._rank.meet(Vote(case, how, "" if error is None else _brief(error), at))
        if any(vote.case != case and vote.outcome not in ("ended", "died") for vote in answer.votes):
            raise RuntimeError(f"{case}: all ranks have to enter it, and come to its end")
        happened = [*answer.happened, *_failures(answer)]
        seen = next((each for each in happened if self._text in each.text), None)
        if seen is None:
            pytest.fail(f"{case}: {self._instead(happened, answer)}")
        self.cause = seen.text
        if error is None:
            return False
        if how == "failed" and self._text not in _failure(self._number, answer.votes):
            return False
        self.error, self.seconds = error, max(0.0, at - seen.at)
        return True

    def _instead(self, happened: list[Happened], answer: Agreed) -> str:
        texts = [each.text for each in happened]
        for rank, vote in enumerate(answer.votes):
            if vote.outcome == "lost others":
                texts.append(f"rank {rank} lost others: {vote.reason}")
            elif vote.outcome == "ended" and not any(text.startswith(f"rank {rank} ") for text in texts):
                texts.append(f"rank {rank} ended the test")
        return f"this happened instead: {'; '.join(texts)}" if texts else "nothing happened to any rank"


def is_lost(error: BaseException) -> bool:
    """Return whether an error, or what it came from, is of a collective that has lost another rank."""
    while True:
        text = f"{type(error).__name__}: {error}"
        is_of_torch = isinstance(error, RuntimeError | dist.DistError)
        if is_of_torch and (BROKEN_CONNECTION.search(text) or _LOST.search(text)):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _failures(answer: Agreed) -> Iterator[Happened]:
    for rank, vote in enumerate(answer.votes):
        if text := _failure(rank, answer.votes):
            yield Happened(text, vote.more)


def _failure(rank: int, votes: tuple[Vote, ...]) -> str:
    failed = votes[rank].outcome == "failed"
    return f"rank {rank} of {len(votes)} failed: {votes[rank].reason}" if failed else ""
