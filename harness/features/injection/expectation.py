"""A fault that a test expects, and what its survivors see of it. Inside a rank; imports torch."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import pytest
import torch.distributed as dist

from lockstep.backends import BROKEN_CONNECTION, backends_of
from lockstep.exceptions import PeerFailed
from lockstep.features.injection.calls import INTERCEPTION, Call, Run
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE, EndOfBlock, Expects, Happened, LeavesByError
from lockstep.features.injection.work import Watched
from lockstep.protocol import VICTIM_OF_A_CASE, Agreed, Part, Vote

if TYPE_CHECKING:
    from lockstep.features.injection.injector import Faults
    from lockstep.rank.process import Rank

__tracebackhide__ = True  # under pytest a failure points to the call

WITHIN = 5.0
"""Seconds for which ranks have to stand still, where one that hangs is expected."""
# What collectives raise that have no answer in time. Not a mismatch, which is an error of its own.
_LOST = re.compile(
    r"gloo.*tim(ed out|eout)|monitoredBarrier|\bCollectiveTimeout\b", re.IGNORECASE | re.DOTALL
)
# These end the run, or the process: such a rank meets no other any more.
OF_THE_RUN = (KeyboardInterrupt, SystemExit, GeneratorExit, pytest.exit.Exception)
_NOT_COVERED = ("send", "recv", "recv_any_source", "monitored_barrier")
"""Collectives for which no wait is patient: a second one for a message that has come would never end; the
last one has no handle."""


class Expectation:
    """A context in which a fault is expected: what survivors see of it is no failure.

    All ranks enter it, before the fault; at its end all that are left meet. The error of a collective that
    has lost another rank is caught there, and so is the exception that was expected; others are not, and
    fail the test on all ranks.

    Args:
        rank: this rank.
        faults: the faults that were injected on it.
        lost_peers: the ranks that it has lost.
        text: a part of the words of a report.
        within: seconds for which ranks have to stand still.

    Attributes:
        error: the error that was caught on this rank, None if there was none.
        seconds: from the fault to that error, None if there was none.
        cause: what has happened, in the words of a report; "" before the end of the context.
    """

    def __init__(self, rank: Rank, faults: Faults, lost_peers: LostPeers, text: str, within: float) -> None:
        self.error: Exception | None = None
        self.seconds: float | None = None
        self.cause = ""
        self._rank, self._faults, self._lost_peers = rank, faults, lost_peers
        self._text, self._within = text, within
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(patient_waits(self._rank, self._lost_peers))
        self._rank.wire.send(Part(FEATURE, Expects(self._text, self._within)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        at = time.time()
        self._stack.close()
        if isinstance(error, OF_THE_RUN):
            return False
        how = _how(error)
        if error is not None:
            self._rank.abort()  # frees the ranks that wait for this one
            self._rank.wire.post(Part(FEATURE, LeavesByError()))
        case = f"faults.expect({self._text!r})"
        reason = "; ".join(self._faults.misses())
        if error is not None:
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        answer = self._rank.meet(Vote(case, how, reason, EndOfBlock(at), inside=True))
        if how == "claimed":
            return False
        others = [vote.case != case and vote.outcome not in ("ended", "died") for vote in answer.votes]
        _follow(
            rank
            for rank, vote in enumerate(answer.votes)
            if vote.outcome == "claimed" or (others[rank] and vote.outcome == "failed")
        )
        if any(others):
            raise RuntimeError(f"{case}: all ranks have to enter it, and come to its end")
        happened: tuple[Happened, ...] = answer.parts[FEATURE]
        seen = next((each for each in happened if self._text in each.text), None)
        if seen is None:
            pytest.fail(f"{case}: {self._instead(answer)}")
        self.cause = seen.text
        expected = {each.rank for each in happened if self._text in each.text}
        wrong = {rank for rank, vote in enumerate(answer.votes) if vote.outcome == "failed"} - expected
        if how == "failed" and self._faults.rank in wrong:
            return False
        _follow(wrong)
        if error is None:
            return False
        assert isinstance(error, Exception)
        self.error, self.seconds = error, max(0.0, at - seen.at)
        return True

    def _instead(self, answer: Agreed) -> str:
        texts = [each.text for each in answer.parts[FEATURE]]
        for rank, vote in enumerate(answer.votes):
            if vote.outcome == "lost others":
                texts.append(f"rank {rank} lost others: {vote.reason}")
            elif vote.outcome == "ended" and not any(text.startswith(f"rank {rank} ") for text in texts):
                texts.append(f"rank {rank} ended the test")
        happened = f"this happened instead: {'; '.join(texts)}" if texts else "nothing happened to any rank"
        missed = [vote.reason for vote in answer.votes if vote.outcome == "ran through" and vote.reason]
        return "\n".join([happened, *missed])


def is_lost(error: BaseException) -> bool:
    """Return whether an error is of a collective that has lost another rank.

    What it came from does not count: code that recovers may have a bug of its own.
    """
    text = f"{type(error).__name__}: {error}"
    is_of_torch = isinstance(error, RuntimeError | dist.DistError)
    return is_of_torch and bool(BROKEN_CONNECTION.search(text) or _LOST.search(text))


def _how(error: BaseException | None) -> str:
    """Return the outcome that a rank votes; "claimed": a failed assertion or a skip, which is no fault."""
    if error is None:
        return "ran through"
    if not isinstance(error, Exception) or isinstance(error, AssertionError):
        return "claimed"
    return "lost others" if is_lost(error) else "failed"


def _follow(ranks: Iterable[int]) -> None:
    """Fail with other ranks, if there are any that fail the test: they will not meet this one any more."""
    if names := ", ".join(map(str, sorted(ranks))):
        raise PeerFailed(f"{VICTIM_OF_A_CASE}rank {names}")


@contextmanager
def patient_waits(rank: Rank, lost_peers: LostPeers) -> Iterator[None]:
    """Let every wait for a collective of gloo that begins inside end, where another rank has gone."""
    numbers = itertools.count(1)

    def layer(call: Call, run: Run) -> dist.Work | None:
        work, title = run(call.written, call.read), call.title(next(numbers))
        members = set(dict(rank.group.members()).get(call.group, ()))
        if work is None or not members or not _is_covered(call):
            return work
        return Watched(work, call.result, begin_wait=lambda: lost_peers.await_end(work, members, title))

    with INTERCEPTION.layer(layer, is_innermost=True):
        yield


def _is_covered(call: Call) -> bool:
    devices = {each.device.type for each in (*call.written, *call.read)} or {"cpu"}
    backends = backends_of(dist.get_backend_config(call.group))
    return call.about.op not in _NOT_COVERED and all(backends.get(each) == "gloo" for each in devices)
