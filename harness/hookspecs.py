"""Names that other plugins rely on: hooks that they may implement, and the name of a rank's own plugin.

Used on both sides; must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lockstep.subtests import ExpectedFailure

RANK_PLUGIN = "harness-rank"
"""The name under which a rank registers its session with pytest; no other pytest process has it."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_expected_failures(item: pytest.Item) -> Sequence[ExpectedFailure] | None:
    """Return the failures that are expected of cases of `run_subtests` in `item`. Called in each rank."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_rerun(item: pytest.Item) -> Sequence[str] | None:
    """Return a node id, and options, that select `item` in a run without others. Called in the controller.

    The default is its own node id. Of an installed file it may be `--pyargs`, and the module for the path.
    """
