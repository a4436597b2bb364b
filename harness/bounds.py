"""Bounds of the numbers that options, marks and fixtures take. Used on both sides; standard library only."""

from __future__ import annotations

from typing import Any

MOST_SECONDS = 1_000_000
"""Limit of any wait: eleven days. The system's calls take 24 at most, and neither infinity nor NaN."""
MOST_RANKS = 1_000_000
"""Limit of a world that one process stands for, which keeps lists of that length."""
MOST_PROCESSES = 10_000
"""Limit of any other world: each rank is a process of 50 MB or more."""
SEEDS = range(-(2**63), 2**64)
"""Seeds that generators of torch take."""

SECONDS = f"a number of seconds above 0, at most {MOST_SECONDS}"


def is_whole(value: object) -> bool:
    """Return whether a value is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float, and no bool; infinity and NaN are floats."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_seconds(value: Any) -> bool:
    """Return whether a value is a number of seconds that can be waited for."""
    return is_number(value) and 0 < value <= MOST_SECONDS


def shown(value: object) -> str:
    """Return the repr of a value for an error about it, cut; an int of 4,301 digits has none."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} without a repr: {error}>"
    return text if len(text) <= 100 else f"{text[:60]}... ({len(text)} characters)"
