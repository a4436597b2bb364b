"""The user's terminal, lent to one rank of every world for a debugger (`--rank-pdb`).

It is made in the controller and sent to a rank among the arguments of its process; standard library only.
"""

from __future__ import annotations

import io
import os
import sys
import termios
from collections.abc import Callable
from typing import Any

from lockstep.launch.multiprocessing_internals import sent_descriptor

STREAMS = (0, 1, 2)


class Terminal:
    """The three standard streams of the process it is made in, to be lent to the rank with number `rank`.

    Descriptors are sent, and no path is opened: a pipe or a file keeps its position, a socket cannot be
    opened, and a terminal may belong to another user after `su`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._streams = tuple(os.dup(stream) for stream in STREAMS)
        first = self._streams[0]
        self._settings = termios.tcgetattr(first) if os.isatty(first) else None

    def __reduce__(self) -> tuple[Callable[..., SentTerminal], tuple[Any, ...]]:
        return SentTerminal, tuple(map(sent_descriptor, self._streams))

    def close(self) -> None:
        """Restore settings that a rank which was killed at its prompt has left changed, such as no echo."""
        if self._settings is not None:
            termios.tcsetattr(self._streams[0], termios.TCSADRAIN, self._settings)
        for stream in self._streams:
            os.close(stream)


class SentTerminal:
    """A terminal on its way to a rank, and in it."""

    def __init__(self, *streams: Any) -> None:
        self._streams = [stream.detach() for stream in streams]

    def take(self) -> None:
        """Make it the standard streams of this process: line editing needs numbers 0 and 1."""
        for sent, stream in zip(self._streams, STREAMS, strict=True):
            os.dup2(sent, stream)
            os.close(sent)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        # Of commands from a pipe, leave those after the last line read to the rank of the next world.
        sys.stdin._CHUNK_SIZE = 1  # type: ignore[attr-defined]
