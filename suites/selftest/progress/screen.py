"""A terminal of a few rows: pytest runs in a pseudo-terminal, and what it writes is read off a screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Callable
from pathlib import Path

_PARTS = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|(\r|\n)|([^\x1b\r\n]+)")


class Screen:
    """A screen without colours, which has as many rows as are written."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self._row = self._column = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        """Write what a program has written."""
        for arguments, command, control, words in _PARTS.findall(text):
            if words:
                row = self.rows[self._row].ljust(self._column)
                end = self._column + len(words)
                self.rows[self._row] = row[: self._column] + words + row[end:]
                self._column = end
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row += 1
                self.rows += [""] * (self._row + 1 - len(self.rows))
            elif command == "J":
                self.rows[self._row] = self.rows[self._row][: self._column]
                del self.rows[self._row + 1 :]
            elif command == "K":
                self.rows[self._row] = self.rows[self._row][: self._column]
            elif command == "A":
                self._row -= int(arguments or 1)
            elif command == "C":
                self._column += int(arguments or 1)
            else:
                assert command in ("", "m"), command


def run_in_terminal(
    command: list[str], path: Path, environ: dict[str, str], columns: int, look: Callable[[Screen], object]
) -> Screen:
    """Run a program in a terminal to its end, and `look` at the screen each time that it writes."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(path)
        os.execvpe(command[0], command, environ)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen, until = Screen(), time.monotonic() + 120
    with contextlib.suppress(OSError):  # the end of a pseudo-terminal
        while text := os.read(terminal, 65536):
            screen.feed(text.decode(errors="replace"))
            look(screen)
            assert time.monotonic() < until, screen.rows
    os.close(terminal)
    os.waitpid(pid, 0)
    return screen
