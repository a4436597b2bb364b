"""Runs items as ranks of fake worlds. Runs inside a rank."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from lockstep.features.fake.ranks import FEATURE, FakeRank
from lockstep.features.fake.values import FakeValues
from lockstep.protocol import RunItem
from lockstep.rank.process import Rank
from lockstep.rank.state import RankState


class FakeWorlds:
    """Makes the one process of a fake world the rank that an order names, for its item."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def pytest_ranks_begin(self, order: RunItem) -> None:
        """Join the group of that rank, and be it for the fixture `world`."""
        fake: FakeRank = order.parts[FEATURE]
        before = RankState.capture()
        world = self._rank.world
        self._rank.group.stand_for(fake.rank, fake.size)
        world.rank, world.size = world.local_rank, world.local_size = fake.rank, fake.size
        self._rank.adopt_state(before)

    @pytest.hookimpl(wrapper=True, trylast=True)  # sees operations before the modes of other features
    def pytest_ranks_run_item(self, order: RunItem) -> Generator[None, object, object]:
        """Keep a test from taking for a result what its collectives return."""
        with FakeValues(order.parts[FEATURE], self._rank.spec.session.cwd):
            return (yield)
