"""The fixtures of ranks: `world`, `run_subtests`, `collectives`. Must not import torch.

A project that has fixtures of these names keeps them: a fixture of a conftest or a test file comes before one
of a plugin. It reaches ours under other names by importing them in its conftest:

    from lockstep.fixtures import world as rank_world
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.rank.world_fixture import RankWorld
    from lockstep.recorders import CollectivesLog
    from lockstep.subtests import RunSubtests

__all__ = ["collectives", "run_subtests", "world"]


def __getattr__(name: str) -> Any:
    """Return a fixture of a feature, which projects import here too."""
    from lockstep.features import plugins

    for plugin in () if name.startswith("_") else plugins():
        if isinstance(found := vars(plugin).get(name), type(world)):
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> RankWorld:
    """The world this rank belongs to: rank, size, device, mesh, gather and more."""
    return session_of(request).world


@pytest.fixture
def run_subtests(request: pytest.FixtureRequest, subtests: Any) -> RunSubtests:
    """Run a claim for each case of a product of settings, on all ranks together."""
    from lockstep.subtests import RunSubtests, parse_selection

    selection = parse_selection(request.config.getoption("subtest"))
    expected = request.config.hook.pytest_ranks_expected_failures(item=request.node) or ()
    return RunSubtests(session_of(request).rank, subtests, selection, expected)


@pytest.fixture
def collectives() -> Iterator[CollectivesLog]:
    """A log of every collective that this rank issues during the test, forward and backward."""
    from lockstep.recorders import CollectivesLog

    with CollectivesLog() as log:
        yield log
