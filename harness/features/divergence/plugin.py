"""The plugin of divergences: where two runs differ, the test runs again, and ranks record it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.exceptions import Diverged
from lockstep.features.divergence import FEATURE
from lockstep.hookspecs import RANK_PLUGIN, Ending

if TYPE_CHECKING:
    from lockstep.options import Options
    from lockstep.protocol import RunItem
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.outcome import ItemOutcome


def pytest_ranks_short_options() -> Options:
    return {
        "no-divergence": {
            "action": "store_true",
            "help": "where two runs, or ranks, differ, do not run the test again to find where they part "
            "first",
        },
    }


# In a rank


@pytest.hookimpl(tryfirst=True)  # another feature returns an item
def pytest_ranks_item(item: pytest.Item, order: RunItem) -> None:
    if FEATURE in order.parts:
        session: Any = item.config.pluginmanager.get_plugin(RANK_PLUGIN)
        manager = item.config.pluginmanager
        manager.register(RecordedItem(session.rank.spec.session.cwd, manager))


def pytest_ranks_failed(
    item: pytest.Item, report: pytest.TestReport, error: BaseException, parts: dict[str, Any]
) -> None:
    # The search of a property for a smaller example ends with a recorded run of that.
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    if isinstance(error, Diverged) and not (is_property or item.config.option.ranks_no_divergence):
        parts[FEATURE] = report.context.msg or "" if isinstance(report, pytest.SubtestReport) else ""


class RecordedItem:
    """Records what one item computes.

    Args:
        base: directory that the user's files are named from.
        manager: of the rank's session.
    """

    def __init__(self, base: str, manager: pytest.PytestPluginManager) -> None:
        self._base, self._manager = base, manager

    @pytest.hookimpl(wrapper=True)
    def pytest_ranks_run_item(self, item: pytest.Item, order: RunItem) -> Generator[None, object, object]:
        from lockstep.recorders import ExecutionLog
        from lockstep.subtests import only_cases

        with only_cases(item.config, order.parts[FEATURE]), ExecutionLog(self._base):
            return (yield)

    def pytest_ranks_finished(self, ending: Ending) -> None:
        """End with the item, and its rank after it, if torch's compiler is there.

        Code that dynamo meets under the log it marks, for the whole process, as never to be compiled.
        """
        self._manager.unregister(self)
        ending.usable = ending.usable and "torch._dynamo" not in sys.modules


# In the controller


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
