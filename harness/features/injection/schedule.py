"""Delays of a rank, drawn from a seed. Used on both sides; must not import torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

from lockstep.bounds import SEEDS, is_whole, shown

MILLISECONDS = 3.0
"""The longest delay, unless the option or the mark says otherwise."""
LONGEST = 60_000
"""Milliseconds that a delay may have."""
CHANCE = 0.25
"""Chance of a delay at a point: with most points undisturbed, ranks are apart by different collectives."""

_FORM = "write SEED or SEED:MILLISECONDS, such as 7 or 7:20"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The delays of all ranks: the same seed has the same ones.

    Attributes:
        seed: from 0.
        milliseconds: the longest delay.
    """

    seed: int
    milliseconds: float = MILLISECONDS

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `--skew` takes.

        Raises:
            ValueError: it has another form; the message says what to write.
        """
        seed, colon, longest = text.partition(":")
        try:
            schedule = cls(int(seed), float(longest) if colon else MILLISECONDS)
        except ValueError:
            raise ValueError(f"{shown(text)}: {_FORM}") from None
        if not is_seed(schedule.seed) or not 0 < schedule.milliseconds <= LONGEST:
            allowed = f"a seed is from 0 to 2**64 - 1, a delay above 0 and at most {LONGEST} milliseconds"
            raise ValueError(f"{shown(text)}: {allowed}")
        return schedule

    def __str__(self) -> str:
        return f"{self.seed}" if self.milliseconds == MILLISECONDS else f"{self.seed}:{self.milliseconds:g}"

    def delay(self, rank: int, number: int, point: str) -> float:
        """Return the seconds, 0 for most points, that a rank waits at a point of a collective.

        Args:
            number: of the collective on this rank.
            point: "before", "after", "waited", or "callback" of autograd, which have numbers of their own.
        """
        drawn = hashlib.blake2b(f"{self.seed}/{rank}/{number}/{point}".encode(), digest_size=16).digest()
        chance = int.from_bytes(drawn[:8], "big") / 2**64
        length = int.from_bytes(drawn[8:], "big") / 2**64
        return length * self.milliseconds / 1000 if chance < CHANCE else 0.0


def is_seed(value: object) -> bool:
    return is_whole(value) and value in SEEDS[2**63 :]
