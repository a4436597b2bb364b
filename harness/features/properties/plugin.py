"""The plugin of property tests: ranks are kept in step, and examples that end worlds are made smaller."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.properties.messages import FEATURE, NOTES, STATISTICS, Search, read_running_example
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.protocol import RunItem
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.outcome import ItemOutcome

_SEARCHES = "harness-searches"

# In the controller


def pytest_collection_finish(session: pytest.Session) -> None:
    """Register the half of the controller once a file of tests has imported Hypothesis."""
    manager = session.config.pluginmanager
    if "hypothesis" in sys.modules and not (manager.hasplugin(RANK_PLUGIN) or manager.hasplugin(_SEARCHES)):
        manager.register(Searches(), _SEARCHES)


class Searches:
    """The searches of property tests in the controller."""

    def pytest_ranks_order(self, parts: dict[str, Any]) -> None:
        parts[FEATURE] = Search(secrets.randbits(128))

    def pytest_ranks_outcome(self, outcome: ItemOutcome) -> None:
        """Note the example that each rank was in at the end of the item."""
        if not outcome.is_clean():
            paths = {
                rank.rank: rank.spec.path_of("running") for rank in outcome.ranks if rank.spec is not None
            }
            examples = {rank: read_running_example(path) for rank, path in paths.items()}
            found = {rank: example for rank, example in examples.items() if example is not None}
            outcome.parts[FEATURE] = found

    def pytest_ranks_again(
        self, order: RunItem, outcome: ItemOutcome, run: Callable[[RunItem], ItemOutcome]
    ) -> ItemOutcome | None:
        """Look for the smallest example that ends a world, if one has."""
        if not outcome.parts.get(FEATURE):
            return None
        from lockstep.features.properties.crashed_examples import find_smallest

        return find_smallest(order, outcome, run)

    def pytest_ranks_reported(self, outcome: ItemOutcome, reports: list[pytest.TestReport]) -> None:
        """Put the statistics where Hypothesis's plugin looks for them, once."""
        for report in reports:
            vars(report).pop(STATISTICS, None)
        if reports and (statistics := _first(outcome.last_run or outcome, STATISTICS)):
            vars(reports[-1])[STATISTICS] = statistics


def pytest_ranks_sections(context: Context) -> tuple[str, str] | None:
    """Show the failing example where no traceback does: a crash has none."""
    last = context.outcome.last_run
    return ("failing example", example) if last and (example := _first(last, NOTES)) else None


def _first(outcome: ItemOutcome, name: str) -> str:
    """Return what the first rank that has anything under a name has added to a report, "" if none has."""
    reports = (report for rank in outcome.ranks for report in rank.reports)
    return next((str(report[name]) for report in reports if name in report), "")


# In a rank


def pytest_ranks_item(item: pytest.Item, order: RunItem) -> None:
    """Keep property tests in step from the first item on whose order is of a search."""
    manager = item.config.pluginmanager
    if FEATURE in order.parts and not manager.hasplugin(FEATURE):
        from lockstep.features.properties.rank import Properties

        session: Any = manager.get_plugin(RANK_PLUGIN)
        manager.register(Properties(session.rank), FEATURE)
