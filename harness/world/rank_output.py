"""Output of a rank, read from its files.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.output import KEEP_ALL, MAX_TEXT, read_truncated, truncate
from lockstep.place import Moved
from lockstep.tracebacks import shorten

Sections = tuple[tuple[str, str], ...]
"""Pairs of a stream's name, "stdout" or "stderr", and a text."""


@dataclass(frozen=True, slots=True)
class RankOutput:
    """The output of one rank in the phase that it is in, and outside of pytest's capture.

    pytest empties the files it captures in after each phase. Output that a test's own `capsys` holds is in
    the rank's memory and not here.
    """

    directory: Path
    """The directory of the files that pytest captures in, as `lockstep.rank.capture` names them."""
    log: Path
    start: int
    """Offset in the log at which the test begins, in bytes."""
    moved: Moved = ()
    """Moved directories of the rank: see `as_here`."""

    def captured(self, most: int = MAX_TEXT) -> Sections:
        """Return what there is of stdout and stderr, each truncated to `most` bytes."""
        sections = []
        for stream in ("stdout", "stderr"):
            # More than one file where a subtest, or capfd, captures inside the capture of the test.
            parts = [read_truncated(path, most=most, remedy=KEEP_ALL) for path in self._files(stream)]
            sections += [(stream, "".join(parts))] if any(parts) else []
        return tuple(sections)

    def read(self, most: int = MAX_TEXT) -> str:
        """Return all there is, each part truncated to `most` bytes: stdout, stderr, the log."""
        texts = [*(text for _, text in self.captured(most)), self.logged(most)]
        return "\n".join(text.strip("\n") for text in texts if text)

    def logged(self, most: int = MAX_TEXT) -> str:
        """Return what was written outside of pytest's capture since the test began."""
        text = read_truncated(self.log, self.start, remedy=KEEP_ALL)
        text = re.sub(r"\nExtension modules:.*", "", text)  # faulthandler lists all of numpy's and torch's
        return truncate(shorten(as_here(text, self.moved)), most, KEEP_ALL)

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

    def _files(self, stream: str) -> list[Path]:
        return sorted(self.directory.glob(f"*.{stream}"))


def as_here(text: str, moved: Moved) -> str:
    """Return a text of another host with the directories of this one, for which those of that one stand."""
    for here, there in moved:
        text = re.sub(rf"{re.escape(there)}(?=[/\s\"']|$)", here.replace("\\", r"\\"), text)
    return text


def _append(path: Path, start: int, to: Path) -> None:
    if path.stat().st_size > start:
        to.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as source, to.open("ab") as target:
            source.seek(start)
            shutil.copyfileobj(source, target)
