"""The fixture `compiles`: compilations of this rank while the test ran. Runs in a rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lockstep.features.compiles.compilation import (
    DISAGREE,
    Frame,
    GraphBreak,
    distinct_breaks,
    first_difference,
)
from lockstep.features.compiles.trace import TraceReader
from lockstep.protocol import Vote
from lockstep.subtests import VotingRank

__tracebackhide__ = True

_MEETING = "what ranks have compiled"


def compiler_needed() -> str:
    """Return the reason to skip a test of inductor where there is no C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    return (
        f"inductor needs a C++ compiler, and there is no {name}: apt-get install g++, or set CXX to another"
    )


class Compiles:
    """Compilations of this rank since the test began, by torch's structured trace.

    At the end of a test that passes, ranks compare them: frames, graphs, breaks, the guards that failed, and
    whether torch's caches had them. A difference fails the test on all ranks: in a real job
    the next collective would hang, or one rank would wait for another that still compiles.
    """

    def __init__(self, rank: VotingRank, number: int, reader: TraceReader) -> None:
        self._rank, self._number, self._reader = rank, number, reader
        self._may_differ = ""

    @property
    def frames(self) -> Sequence[Frame]:
        """The compilations, in order; those of a frame that was compiled again, too."""
        return tuple(self._reader.frames)

    @property
    def graphs(self) -> Sequence[Frame]:
        """The frames of which torch has compiled a graph."""
        return tuple(frame for frame in self.frames if frame.graph)

    @property
    def breaks(self) -> Sequence[GraphBreak]:
        """The graph breaks, each place and reason once."""
        return distinct_breaks(self.frames)

    @property
    def recompilations(self) -> Sequence[Frame]:
        """The compilations of frames that had been compiled before; `recompiled` is the guard that failed."""
        return tuple(frame for frame in self.frames if frame.recompiled)

    @property
    def cache_hits(self) -> int:
        """Number of times that torch's caches had the code of a graph."""
        return sum(cache.endswith(": hit") for frame in self.frames for cache in frame.caches)

    @property
    def cache_misses(self) -> int:
        """Number of times that torch's caches did not have the code of a graph."""
        return sum(cache.endswith(": miss") for frame in self.frames for cache in frame.caches)

    @property
    def seconds(self) -> float:
        """Seconds that this rank has compiled for."""
        return sum(frame.seconds for frame in self.frames)

    def assert_none_recompiled(self) -> None:
        """Assert that no frame was compiled twice.

        Raises:
            AssertionError: it names the frames, and the guards that failed.
        """
        __tracebackhide__ = True
        if self.recompilations:
            lines = "\n".join(f"  {frame}: {frame.recompiled}" for frame in self.recompilations)
            raise AssertionError(f"rank {self._number} has compiled again:\n{lines}")

    @contextmanager
    def assert_nothing_compiled(self) -> Iterator[None]:
        """Assert that nothing is compiled inside: in the steps of a training after the first, say.

        Raises:
            AssertionError: it names the frames, and the guards that failed.
        """
        __tracebackhide__ = True
        before = len(self.frames)
        yield
        if new := self.frames[before:]:
            lines = "\n".join(f"  {frame.words()}" for frame in new)
            what = "what should have been compiled before"
            raise AssertionError(f"rank {self._number} has compiled {what}:\n{lines}")

    def require_compiler(self) -> None:
        """Skip the test, on all ranks, where inductor has no C++ compiler for code that runs on the CPU."""
        if shutil.which(os.environ.get("CXX") or "g++") is None:
            pytest.skip(compiler_needed())

    def ranks_may_differ(self, why: str) -> None:
        """Let ranks compile different code in this test.

        Args:
            why: a reason for the reader of the test: stages of a pipeline, say.

        Raises:
            ValueError: there is no reason.
        """
        if not why.strip():
            raise ValueError("compiles.ranks_may_differ: write why ranks compile different code in this test")
        self._may_differ = why

    def compare_ranks(self) -> None:
        """Fail if another rank has compiled something else. All ranks call it at the end of the test."""
        __tracebackhide__ = True
        votes = self._rank.agree(Vote(_MEETING, "met", more=None if self._may_differ else self.frames))
        if any(vote.case != _MEETING or vote.outcome != "met" or vote.more is None for vote in votes):
            return  # another one has failed, which is the reason to report
        by_rank: dict[int, Sequence[Frame]] = {rank: vote.more for rank, vote in enumerate(votes)}
        if difference := first_difference(by_rank):
            remedy = "If that is right, say why in the test: compiles.ranks_may_differ(...)"
            raise AssertionError(f"{DISAGREE}: {difference}\n{remedy}")
