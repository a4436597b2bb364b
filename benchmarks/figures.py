"""Figures of the benchmarks: comparison, tables, verdicts, and the machine they were measured on."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import median
from typing import Any


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the quotient of the medians; not a number if one has no samples."""
    return median(over) / median(under) if over and under else math.nan


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns also line up as plain text."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


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
    }
