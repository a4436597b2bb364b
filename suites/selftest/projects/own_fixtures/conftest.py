"""A project whose fixtures have the names of ours, and that uses ours under other names."""

import pytest

from lockstep.fixtures import collectives as rank_collectives
from lockstep.fixtures import golden as rank_golden
from lockstep.fixtures import run_subtests as rank_subtests
from lockstep.fixtures import world as rank_world

__all__ = ["rank_collectives", "rank_golden", "rank_subtests", "rank_world"]


@pytest.fixture
def world():
    return "of the project"


@pytest.fixture(scope="session")
def engine():
    return "steam"


@pytest.fixture(params=["stamps", "coins"])
def collectives(request):
    return request.param
