"""Figures of the benchmarks: comparison, tables, verdicts, files, and the machine they were measured on."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the quotient of the medians; not a number if one has no samples."""
    return median(over) / median(under) if over and under else math.nan


@dataclass(frozen=True)
class Table:
    """A table of figures, and a sentence on how to read it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        """Return it in Markdown, with columns that also line up as plain text."""
        lines = (self.header, *self.rows)
        return self._text([max(len(line[column]) for line in lines) for column in range(len(self.header))])

    def markdown(self) -> str:
        """Return it as pages have it: where one cell changes, no other line does."""
        return self._text([0] * len(self.header))

    def _text(self, widths: Sequence[int]) -> str:
        lines = [self.header, ["-" * max(width, 3) for width in widths], *self.rows]
        rows = (
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        )
        return "\n".join([*rows, *(["", self.note] if self.note else [])])


def verdicts(held: Mapping[str, bool]) -> str:
    """Return a line for each thing that was wanted: whether it held, and what it is."""
    return "\n".join(f"{'held  ' if ok else 'MISSED'}  {what}" for what, ok in held.items())


def describe_machine() -> dict[str, Any]:
    """Return what the figures are taken on, and how busy others keep it before anything runs."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit(ROOT),
    }


def commit(root: Path) -> str:
    """Return what is checked out, such as "55d199b5", "55d199b5 and changes" if a file differs, or "unknown".

    Pages and published figures may differ: `publish.py` writes them between one benchmark and the next.
    """
    pages = (":!docs", ":!README.md", ":!benchmarks/published")
    texts = []
    for words in (["rev-parse", "--short=8", "HEAD"], ["status", "--porcelain", "--", ".", *pages]):
        try:
            done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
            return "unknown"
        texts.append(done.stdout.strip())
    head, changes = texts
    return f"{head} and changes" if changes else head


def write_json(
    path: Path | None, machine: Mapping[str, Any], tables: Mapping[str, Table], samples: object = None
) -> None:
    """Write what `publish.py` reads, and all samples; nothing without a path.

    Args:
        path: what was given to `--json`.
        machine: as it was described before anything ran.
        tables: by the names that pages choose them by.
        samples: anything that json can write.
    """
    if path is None:
        return
    kept = {
        "command": command(sys.argv),
        "date": date.today().isoformat(),
        "machine": machine,
        "tables": {name: asdict(table) for name, table in tables.items()},
        "samples": samples,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")


def command(argv: Sequence[str]) -> str:
    """Return the command line that started a benchmark, without where it writes to."""
    words = [os.path.relpath(argv[0], ROOT), *argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return shlex.join(["python", *words])
