"""The plugin of divergences: where two runs differ, the test runs again, and ranks record it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import pytest

from lockstep.features.divergence import FEATURE
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import Options, add_long_names

if TYPE_CHECKING:
    from lockstep.protocol import RunItem
    from lockstep.rank.session import RankSession
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.outcome import ItemOutcome

_OPTIONS: Options = {
    "no-divergence": {
        "action": "store_true",
        "help": "where two runs, or ranks, differ, do not run the test again to find where they part first",
    },
}


def pytest_addoption(parser: pytest.Parser) -> None:
    add_long_names(parser, _OPTIONS)


def pytest_ranks_short_options() -> Options:
    return _OPTIONS


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and not config.option.ranks_no_divergence:
        from lockstep.features.divergence.rank import Divergences

        config.pluginmanager.register(Divergences(session.rank.spec.session.cwd))


@pytest.hookimpl(wrapper=True)
def pytest_ranks_again(
    item: pytest.Item, order: RunItem, outcome: ItemOutcome, run: Callable[[RunItem], ItemOutcome]
) -> Generator[None, ItemOutcome | None, ItemOutcome | None]:
    """Run what has diverged once more, recorded, after other features have run it."""
    again = yield
    config, outcome = item.config, again or outcome
    if config.option.ranks_no_divergence or config.getoption("rank_pdb", None) is not None:
        return again
    from lockstep.features.divergence.recorded_run import diverged_case, run_recorded

    case = diverged_case(outcome.last_run or outcome)
    return again if case is None else run_recorded(item, order, outcome, case, run)


def pytest_ranks_sections(context: Context) -> tuple[str, str] | None:
    """Say why the recorded run does not explain the failure, where it does not."""
    notes: Mapping[str, str] = context.outcome.parts.get(FEATURE, {})
    return ("first divergence", notes[context.case]) if context.case in notes else None
