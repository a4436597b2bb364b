"""The plugin of exchanges: sees sends and receives on ranks, and pairs them in the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.backends import meets
from lockstep.features.exchanges.exchanged import FEATURE, find_unpaired
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession
    from lockstep.world.outcome import ItemOutcome


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and meets(session.world.backend):
        from lockstep.features.exchanges.rank import Exchanges

        exchanges = Exchanges(session.rank.spec.session.cwd, session.rank.group.members, config.pluginmanager)
        exchanges.install()
        config.pluginmanager.register(exchanges)


def pytest_ranks_outcome(outcome: ItemOutcome) -> None:
    """Name what ranks have left in flight in a test that passed; after a failure it is a consequence."""
    in_world = [rank for rank in outcome.ranks if not rank.has_left_world]
    exchanged = {rank.rank: parts[FEATURE] for rank in in_world if FEATURE in (parts := rank.parts())}
    if exchanged and all(rank.has_passed() for rank in in_world):
        for number, left in find_unpaired(exchanged).items():
            outcome.ranks[number].left_in_flight = left
