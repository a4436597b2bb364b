"""The terminal that the user sits at, lent to one rank of every world for a debugger (`--rank-pdb`).

It is made in the controller and travels to a rank among the arguments of its process; standard library only.
"""

from __future__ import annotations

import io
import os
import sys
import termios
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

STREAMS = (0, 1, 2)


class Terminal:
    """The three standard streams of the process it is made in.

    Descriptors are sent, and no path is opened: a pipe or a file keeps its place, a socket cannot be opened,
    and a terminal may belong to somebody else after `su`.

    Args:
        rank: the rank that it is lent to.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._streams = tuple(os.dup(stream) for stream in STREAMS)
        self._settings = _settings(self._streams[0])

    def __reduce__(self) -> tuple[Callable[..., SentTerminal], tuple[Any, ...]]:
        return SentTerminal, tuple(map(reduction.DupFd, self._streams))

    def close(self) -> None:
        """Put back what a rank that was killed at its prompt has left, such as no echo."""
        if self._settings is not None:
            termios.tcsetattr(self._streams[0], termios.TCSADRAIN, self._settings)
        for stream in self._streams:
            os.close(stream)


class SentTerminal:
    """A terminal on its way to a rank, and there."""

    def __init__(self, *streams: Any) -> None:
        self._streams = [stream.detach() for stream in streams]

    def take(self) -> None:
        """Make it the standard streams of this process: line editing wants numbers 0 and 1."""
        for sent, stream in zip(self._streams, STREAMS, strict=True):
            os.dup2(sent, stream)
            os.close(sent)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
        # Of commands from a pipe, leave those after the last line read to the rank of the next world.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        sys.stdin._CHUNK_SIZE = 1  # type: ignore[attr-defined]


def _settings(stream: int) -> list[Any] | None:
    return termios.tcgetattr(stream) if os.isatty(stream) else None
