"""Failures that are expected of the engine under test: of whole tests by a mark, of points when they run.

Used on both sides; must not import torch.
"""

from __future__ import annotations

import pytest

from harness.conformance.deviations import Deviation, known_deviations
from harness.conformance.selection import claim_of, engine_of

__all__ = ["mark_expected_failure", "points_expected_to_fail"]


def mark_expected_failure(item: pytest.Item) -> None:
    """Mark ``item`` if its engine is known to break the whole of it."""
    for deviation in _deviations(item):
        if deviation.points is None:
            item.add_marker(pytest.mark.xfail(strict=True, reason=deviation.reason, run=deviation.run))


def points_expected_to_fail(item: pytest.Item) -> tuple[Deviation, ...]:
    """Return the deviations that are about subtests of ``item``."""
    return tuple(found for found in _deviations(item) if found.points is not None)


def _deviations(item: pytest.Item) -> tuple[Deviation, ...]:
    options = item.config.option
    # The tables are of CPU ranks. With --runxfail nothing is expected to fail.
    if options.runxfail or options.device == "cuda" or options.backend == "nccl":
        return ()
    return known_deviations(engine_of(item), claim_of(item))
