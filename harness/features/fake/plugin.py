"""The plugin of fake worlds: an item for each rank that a test runs as, all of them on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.fake.ranks import FEATURE, FakeRank, check_as_rank, check_made_up_values, places
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.marker import MarkError, RanksMark
from lockstep.options import default_backend

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal
    from lockstep.protocol import RunItem
    from lockstep.rank.session import RankSession
    from lockstep.world.outcome import ItemOutcome

PLACE = "ranks_place"
"""The parameter of an item of a fake world: its rank and the size of the world."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(*sizes, backend='fake', as_rank=None, made_up_values=False): run the test in fake worlds, one "
        "item for each rank of `as_rank`, which reads what it receives if `made_up_values`.",
    )
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and session.world.backend == FEATURE:
        from lockstep.features.fake.rank import FakeWorlds

        config.pluginmanager.register(FakeWorlds(session.rank))


def pytest_ranks_mark_options() -> Mapping[str, Callable[[RanksMark, Any], Any]]:
    return {"as_rank": check_as_rank, "made_up_values": check_made_up_values}


def pytest_ranks_items(metafunc: pytest.Metafunc, mark: RanksMark) -> bool | None:
    if (mark.backend or default_backend(metafunc.config)) != FEATURE:
        return None
    if len(each := places(mark)) > 1:
        metafunc.fixturenames.append(PLACE)
        metafunc.parametrize(PLACE, each, ids=[f"rank-{rank}-of-{size}" for rank, size in each])
    return True


def pytest_ranks_size(
    item: pytest.Item, mark: RanksMark, backend: str, parts: dict[str, Any]
) -> int | Refusal | None:
    if backend != FEATURE:
        return None
    if not mark.group:
        from lockstep.controller.requests import Refusal

        return Refusal("skipped", "the test makes its own group (group=False), and a fake world has one")
    rank, size = _place_of(item, mark)
    parts[FEATURE] = FakeRank(rank, size, mark.options.get("made_up_values", False))
    return 1


def _place_of(item: pytest.Item, mark: RanksMark) -> tuple[int, int]:
    each, params = places(mark), getattr(getattr(item, "callspec", None), "params", {})
    if len(each) > 1 and PLACE not in params:
        raise MarkError(
            f"ranks({', '.join(map(str, mark.sizes))}) of a fake world: several ranks work only on a test "
            "function; give one size and one rank here: ranks(8, backend='fake', as_rank=0)"
        )
    place: tuple[int, int] = each[0] if len(each) == 1 else params[PLACE]
    if place not in each:
        raise MarkError(
            f"ranks({place[1]}) of a fake world, on one parameter of a test: its items are made before that "
            "is known; mark the test"
        )
    return place


@pytest.hookimpl(tryfirst=True)
def pytest_ranks_outcome(outcome: ItemOutcome, order: RunItem) -> None:
    """Report the process as the rank that it stood for."""
    fake: FakeRank | None = order.parts.get(FEATURE)
    if fake is not None:
        outcome.ranks[0].rank, outcome.ranks[0].world = fake.rank, f"{fake.size} (fake)"
