"""What worlds claim of a machine: ranks that may run, and GPUs; and what can be granted beside other claims.

Arithmetic only; standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What one world holds, or waits for.

    ``ranks``: how many it counts for; 0 where the run sets no bound. ``gpus``: names of the GPUs that it
    has; while it waits, of those it may have. ``exclusive``: nobody else may use these GPUs meanwhile.
    ``pid`` and ``where`` (a directory) tell people whose it is.
    """

    pid: int
    where: str
    ranks: int
    gpus: tuple[str, ...] = ()
    exclusive: bool = False

    def competes(self, other: Claim) -> bool:
        """Whether one of the two may have to wait for the other."""
        if self.ranks and other.ranks:
            return True
        return (self.exclusive or other.exclusive) and not set(self.gpus).isdisjoint(other.gpus)

    def __str__(self) -> str:
        words = [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"] if self.ranks else []
        words += [f"GPU {', '.join(self.gpus)}"] if self.gpus else []
        return f"pid {self.pid} in {self.where} ({'; '.join(words)})"


@dataclass(frozen=True, slots=True)
class Need:
    """What a world of `size` ranks needs: its claim, and how many ranks may run at once (None: any number).

    Of exclusive GPUs it needs one a rank; of others it takes one a rank where so many are to be had, else
    fewer, and ranks share them.
    """

    claim: Claim
    size: int
    at_once: int | None = None

    def choose(self, held: Iterable[Claim]) -> tuple[str, ...] | None:
        """Return the GPUs to take (none for a world on CPUs), or None while what is held leaves too little.

        GPUs that nobody uses come first; the order is the claim's.
        """
        held = list(held)
        claim = self.claim
        if self.at_once is not None and sum(other.ranks for other in held) + claim.ranks > self.at_once:
            return None
        barred = {gpu for other in held if claim.exclusive or other.exclusive for gpu in other.gpus}
        uses = Counter(gpu for other in held for gpu in other.gpus)
        free = sorted((gpu for gpu in claim.gpus if gpu not in barred), key=lambda gpu: uses[gpu])
        chosen = free[: self.size]
        enough = self.size if claim.exclusive else min(1, len(claim.gpus))
        return tuple(gpu for gpu in claim.gpus if gpu in chosen) if len(chosen) >= enough else None

    def __str__(self) -> str:
        claim, words = self.claim, []
        if self.at_once is not None:
            words.append(f"{claim.ranks} of the {self.at_once} ranks that may run at once (ranks_at_once)")
        if claim.gpus:
            number = self.size if claim.exclusive else 1
            words.append(f"{number} of the GPUs {', '.join(claim.gpus)}")
        return " and ".join(words)
