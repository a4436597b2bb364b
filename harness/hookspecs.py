"""Names that other plugins rely on: hooks that they may implement, and the name of a rank's own plugin.

Used on both sides; must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockstep.subtests import ExpectedFailure

RANK_PLUGIN = "harness-rank"
"""The name under which a rank registers its session with pytest; no other pytest process has it."""
CONTROLLER_PLUGIN = "harness-controller"
"""The name under which a controller registers with pytest."""
ONLY_ON_RANKS = "only_on_ranks"
"""Attribute of a fixture's function, True where a test that requests the fixture must be on ranks."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_expected_failures(item: pytest.Item) -> Sequence[ExpectedFailure] | None:
    """Return the failures that are expected of cases of `run_subtests` in `item`. Called in each rank."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_rerun(item: pytest.Item) -> Sequence[str] | None:
    """Return a node id, and options, that select `item` in a run without others. Called in the controller.

    The default is its own node id. Of an installed file it may be `--pyargs`, and the module for the path.
    """


@dataclass(slots=True)
class Ending:
    """The end of an item on a rank, which features complete before the controller hears of it."""

    usable: bool
    """True if the rank can run another item."""
    parts: dict[str, Any] = field(default_factory=dict)
    """Data that features send to their half in the controller, by the name of each."""
