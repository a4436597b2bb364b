"""The plugin of fake worlds: an item for each rank that a test runs as, all of them on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.bounds import is_whole, shown
from lockstep.features.fake import FEATURE, FakeRank
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.marker import MarkError, RanksMark
from lockstep.options import default_backend

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal
    from lockstep.rank.session import RankSession
    from lockstep.world.item_run import ItemRun
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
    return {"as_rank": _check_as_rank, "made_up_values": _check_made_up_values}


def _check_as_rank(mark: RanksMark, given: Any) -> tuple[int, ...] | None:
    """Return a rank or a list of ranks of the mark's smallest world as a tuple."""
    if given is None:
        return None
    error = f"ranks(as_rank={shown(given)})"
    _refuse_other_backends(mark, error)
    ranks, size = tuple(given) if isinstance(given, list | tuple) else (given,), min(mark.sizes)
    for rank in ranks:
        if not is_whole(rank):
            raise MarkError(f"{error}: write a rank, or a list of ranks: as_rank=[0, 511]")
        if not 0 <= rank < size:
            raise MarkError(f"{error}: a world of {size} has the ranks 0 to {size - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise MarkError(f"{error}: name at least one rank, and none twice")
    return ranks


def _check_made_up_values(mark: RanksMark, given: Any) -> bool:
    if not isinstance(given, bool):
        raise MarkError(f"ranks(made_up_values={shown(given)}): made_up_values is True or False")
    if given:
        _refuse_other_backends(mark, "ranks(made_up_values=True)")
    return given


def _refuse_other_backends(mark: RanksMark, error: str) -> None:
    if mark.backend != FEATURE:
        raise MarkError(f"{error}: only in a fake world: add backend='fake'")


def pytest_ranks_items(metafunc: pytest.Metafunc, mark: RanksMark) -> bool | None:
    if (mark.backend or default_backend(metafunc.config)) != FEATURE:
        return None
    if len(each := _places(mark)) > 1:
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


def _places(mark: RanksMark) -> list[tuple[int, int]]:
    """Return rank and world size of each item of a mark; without `as_rank` the first rank and the last."""
    as_rank = mark.options.get("as_rank")
    return [
        (rank, size)
        for size in mark.sizes
        for rank in (dict.fromkeys((0, size - 1)) if as_rank is None else as_rank)
    ]


def _place_of(item: pytest.Item, mark: RanksMark) -> tuple[int, int]:
    each, params = _places(mark), getattr(getattr(item, "callspec", None), "params", {})
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
def pytest_ranks_outcome(run: ItemRun, outcome: ItemOutcome) -> None:
    """Report the process as the rank that it stood for."""
    fake: FakeRank | None = run.order.parts.get(FEATURE)
    if fake is not None:
        outcome.ranks[0].rank, outcome.ranks[0].world = fake.rank, f"{fake.size} (fake)"
