"""Fake worlds: one process runs a test as a rank of a world of any size, and receives nothing.

Used on both sides; must not import torch.
"""

from dataclasses import dataclass

FEATURE = "fake"
"""Name of the feature, and of its backend."""


@dataclass(frozen=True, slots=True)
class FakeRank:
    """The rank of a fake world that an item runs as."""

    rank: int
    size: int
    shows_values: bool
    """True if the test may read what its collectives return."""
