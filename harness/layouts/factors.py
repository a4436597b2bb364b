"""Factors between a wrong number and the right one, and the words of reports. Imports nothing of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

CLOSE = 1e-9
"""A part of the largest value: above rounding, and far below what two hypotheses differ by."""


def describe_factor(factor: float, sizes: Mapping[str, int], microbatches: int) -> str:
    """Return "2 times the reference: multiplied by dp, or tp (2) once too often", say.

    Every product of sizes that is the factor is named; where none is, the factor alone is said.

    Args:
        sizes: of the axes from which it may come.
    """
    for inverse, verb in ((False, "multiplied"), (True, "divided")):
        wanted = 1 / factor if inverse and factor else factor
        found = products(wanted, sizes, microbatches)
        if found and (inverse or wanted > 1):
            times = f"1/{wanted:.4g} of" if inverse else f"{wanted:.4g} times"
            return f"{times} the reference: {verb} by {either(found)} ({wanted:.4g}) once too often"
    if abs(factor - 1) < 1e-6:
        return f"1 {factor - 1:+.1e} times the reference: float32 somewhere, perhaps"
    return f"{factor:.6g} times the reference"


def is_product(factor: float, sizes: Mapping[str, int], microbatches: int) -> bool:
    """Return whether a factor is 1, or a product of sizes, or the inverse of one."""
    return abs(factor - 1) < CLOSE or any(
        products(each, sizes, microbatches) for each in (factor, 1 / factor if factor else 0.0)
    )


def products(wanted: float, sizes: Mapping[str, int], microbatches: int) -> list[str]:
    """Return the names of sizes that have this product."""
    known = {**sizes, **({"the number of microbatches": microbatches} if microbatches > 1 else {})}
    return [
        " and ".join(names)
        for number in range(1, len(known) + 1)
        for names in combinations(known, number)
        if abs(math.prod(known[name] for name in names) - wanted) < CLOSE * abs(wanted)
    ]


def either(texts: Iterable[str]) -> str:
    return ", or ".join(dict.fromkeys(texts))


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(each) for each in sorted(numbers))


def not_finite(values: Mapping[int, float]) -> str:
    """Return on which ranks a number is not finite, "" where it is on all."""
    infinite = [rank for rank, each in values.items() if not math.isfinite(each)]
    return f"is not finite on {ranks(infinite)}" if infinite else ""


def ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
