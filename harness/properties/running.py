"""Which example a rank is in, noted where its death does not take it along. Both sides load this.

Standard library only. A rank writes to a file that it has in memory: the kernel keeps what was written,
whatever becomes of the process, and a draw costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

SIZE = 256 * 1024
"""Bytes of the file: Hypothesis lets an example draw 8 KiB, and a choice takes some bytes more in writing."""
_HEADER = struct.Struct("<BBIII")


@dataclass(frozen=True, slots=True)
class Running:
    """An example: the same one has the same choices in any world that runs the same test."""

    run: int
    """Which property of the test it belongs to, from 1."""
    number: int
    """Which example of the run it is, from 1."""
    choices: bytes
    is_in_body: bool
    """Whether the arguments were drawn; choices that a body draws itself come after."""

    def is_same(self, other: Running) -> bool:
        """Whether this is the other at the same moment. Examples without choices are told by their number."""
        same = (self.run, self.choices, self.is_in_body) == (other.run, other.choices, other.is_in_body)
        return same and (bool(self.choices) or self.number == other.number)


@dataclass(frozen=True, slots=True)
class Lost:
    """An example that has cost a world: a rank died in it, or never came out of it."""

    example: Running
    how: str
    """What became of which rank."""


@dataclass(frozen=True, slots=True)
class Search:
    """What ranks must know alike to search for a failing example alike."""

    entropy: int = 0
    """What Hypothesis draws its seeds from."""
    lost: tuple[Lost, ...] = ()
    """The examples that have cost a world each, as this test was run in it."""
    goes_on: bool = True
    """Whether to look for a smaller example once the last of these has come up."""


class RunningExample:
    """The note as its rank writes it."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._run = self._number = 0
        self._is_in_body = False
        self._end = _HEADER.size

    def begin(self, run: int, number: int) -> None:
        self._run, self._number, self._is_in_body, self._end = run, number, False, _HEADER.size
        self._write_header()

    def enter_body(self) -> None:
        self._is_in_body = True
        self._write_header()

    def draw(self, choice: bytes) -> None:
        """Add a choice. One that finds no room is left out: the note is of no use then."""
        end = self._end + len(choice)
        if end <= SIZE:
            self._memory[self._end : end] = choice
            self._end = end
            self._write_header()

    def end(self) -> None:
        self._memory[0] = 0

    def now(self) -> Running:
        choices = self._memory[_HEADER.size : self._end]
        return Running(self._run, self._number, choices, self._is_in_body)

    def _write_header(self) -> None:
        length = self._end - _HEADER.size
        _HEADER.pack_into(self._memory, 0, 1, self._is_in_body, self._run, self._number, length)


def read_running(path: str) -> Running | None:
    """Return the example that a rank is in, or was in when it died; None if it was in none."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return None
    if len(content) < _HEADER.size:
        return None
    is_active, is_in_body, run, number, length = _HEADER.unpack_from(content)
    if not is_active:
        return None
    return Running(run, number, content[_HEADER.size : _HEADER.size + length], bool(is_in_body))
