"""What a rank has printed, read from outside: a rank that is dead or hangs cannot send it.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.cut import KEEP_ALL, MOST_OF_A_TEXT, cut, read_cut
from harness.dumps import shorten

Sections = tuple[tuple[str, str], ...]
"""Pairs of a stream's name, "stdout" or "stderr", and a text."""


@dataclass(frozen=True, slots=True)
class RankOutput:
    """What one rank printed in the phase that it is in, and what it wrote outside of pytest's capture.

    pytest empties the files it captures in after each phase. Output that a test's own `capsys` holds is in
    the rank's memory and not here.
    """

    directory: Path
    """The directory of the files that pytest captures in, as `harness.rank.capture` names them."""
    log: Path
    start: int
    """Where in the log the test begins, in bytes."""

    def captured(self, most: int = MOST_OF_A_TEXT) -> Sections:
        """Return what there is of stdout and stderr, each cut to `most` bytes."""
        texts = ((stream, self._text(stream, most)) for stream in ("stdout", "stderr"))
        return tuple((stream, text) for stream, text in texts if text)

    def read(self, most: int = MOST_OF_A_TEXT) -> str:
        """Return all there is, each part cut to `most` bytes: stdout, stderr, the log."""
        texts = [*(text for _, text in self.captured(most)), self.logged(most)]
        return "\n".join(text.strip("\n") for text in texts if text)

    def logged(self, most: int = MOST_OF_A_TEXT) -> str:
        """Return what was written outside of pytest's capture since the test began."""
        text = read_cut(self.log, self.start, remedy=KEEP_ALL)
        text = re.sub(r"\nExtension modules:.*", "", text)  # faulthandler lists all of numpy's and torch's
        return cut(shorten(text), most, KEEP_ALL)

    def append_to(self, folder: Path, rank: int) -> None:
        """Append all of it to files `rank-<rank>.stdout`, `.stderr` and, of the log, `.output` in a folder.

        Raises:
            OSError: a file cannot be written.
        """
        for stream in ("stdout", "stderr"):
            for path in self._files(stream):
                _append(path, 0, folder / f"rank-{rank}.{stream}")
        if self.log.exists():
            _append(self.log, self.start, folder / f"rank-{rank}.output")

    def _text(self, stream: str, most: int) -> str:
        # More than one where a subtest, or capfd, captures inside the capture of the test.
        return "".join(read_cut(path, most=most, remedy=KEEP_ALL) for path in self._files(stream))

    def _files(self, stream: str) -> list[Path]:
        return sorted(self.directory.glob(f"*.{stream}"))


def _append(path: Path, start: int, to: Path) -> None:
    if path.stat().st_size > start:
        to.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, to.open("ab") as target:
            source.seek(start)
            shutil.copyfileobj(source, target)
