"""What is known of a claim that an engine breaks, and which tests and points it is about. Without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

__all__ = ["Deviation"]

TRACKER = "https://github.com/pytorch/pytorch/issues"


@dataclass(frozen=True)
class Deviation:
    """A strict expected failure: where the engine holds one of these claims after all, the run fails.

    ``claims``: patterns of node ids below the folder of suites, without the engine's name. ``points``:
    patterns of subtests; None says that the test fails as a whole. In patterns ``*`` stands for anything, and
    all else for itself. ``why``: in a sentence. ``issue``: its number in pytorch/pytorch. ``run``: whether to
    try at all; a world that hangs costs time each time.
    """

    claims: tuple[str, ...]
    why: str
    points: tuple[str, ...] | None = None
    issue: int | None = None
    run: bool = True

    @property
    def reason(self) -> str:
        """What reports say of it."""
        return f"{self.why} (pytorch#{self.issue})" if self.issue else self.why

    def is_about(self, claim: str) -> bool:
        """Whether the test of this node id is meant, or points of it."""
        return any(fits(f"/{claim}", f"*/{pattern}") for pattern in self.claims)

    def is_about_case(self, case: str) -> bool:
        """Whether, of a test that is meant, this subtest is."""
        return any(fits(case, pattern) for pattern in self.points or ())


def fits(text: str, pattern: str) -> bool:
    """Whether ``pattern`` describes all of ``text``. fnmatch would read node ids' brackets as sets."""
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
