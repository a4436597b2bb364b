"""A known deviation of an engine, and the tests and cases that it is about. Must not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import product

SHARDED = "{FULL_SHARD,SHARD_GRAD_OP}"
"""The strategies that shard, for `expand`."""


@dataclass(frozen=True)
class Deviation:
    """A strict expected failure: where the engine holds one of these claims after all, the run fails.

    Attributes:
        claims: patterns of node ids below the folder of suites, without the engine's name. In patterns `*`
            stands for any text, and all else for itself.
        why: the reason, in a sentence.
        cases: patterns of cases of `run_subtests`; None if the test fails as a whole.
        issue: its number in pytorch/pytorch.
        run: whether to try at all; a world that hangs costs time each time.
    """

    claims: tuple[str, ...]
    why: str
    cases: tuple[str, ...] | None = None
    issue: int | None = None
    run: bool = True

    @property
    def reason(self) -> str:
        """The reason that reports give."""
        return f"{self.why} (pytorch#{self.issue})" if self.issue else self.why

    def is_about(self, claim: str) -> bool:
        """Return whether the test of this node id is meant, or cases of it."""
        return any(fits(f"/{claim}", f"*/{pattern}") for pattern in self.claims)

    def is_about_case(self, case: str) -> bool:
        """Return whether this case, of a test that is meant, is meant too."""
        return any(fits(case, pattern) for pattern in self.cases or ())


def fits(text: str, pattern: str) -> bool:
    """Return whether `pattern` describes all of `text`. fnmatch would read node ids' brackets as sets."""
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)


def expand(*patterns: str) -> tuple[str, ...]:
    """Return each pattern with every choice from its braces, as a shell does: `{a,b}c` is `ac` and `bc`."""
    expanded: list[str] = []
    for pattern in patterns:
        pieces = re.split(r"[{}]", pattern)  # every second one was in braces
        choices = [piece.split(",") if number % 2 else [piece] for number, piece in enumerate(pieces)]
        expanded += map("".join, product(*choices))
    return tuple(expanded)
