"""The plugin of timelines: ranks send their flight records, the controller draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep.features.timeline import FEATURE
from lockstep.hookspecs import RANK_PLUGIN, Ending

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession
    from lockstep.rank.status import StatusReader
    from lockstep.reporting.problems import Problem
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.item_run import ItemRun
    from lockstep.world.outcome import ItemOutcome


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ranks").addoption(
        "--timeline",
        metavar="DIR",
        help="draw each test on ranks in DIR/<test>/timeline.html: what each rank called when, who waited "
        "for whom; DIR/index.html lists them (a hang, a mismatch and a death are always shown, as text)",
    )


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None and config.option.timeline:
        config.pluginmanager.register(FlightRecords(session.rank.status))
    elif session is None:
        from lockstep.controller.option_checks import check_folder

        check_folder(config, "--timeline", config.option.timeline)
        if config.option.timeline or config.option.rank_output_dir:
            from lockstep.features.timeline.files import register

            register(config)


class FlightRecords:
    """Sends the calls of each test at its end, with stacks from its begin on."""

    def __init__(self, status: StatusReader) -> None:
        self._status = status

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> None:
        self._status.keep_stacks()

    def pytest_ranks_finished(self, ending: Ending) -> None:
        ending.parts[FEATURE] = self._status.record()


def pytest_ranks_outcome(run: ItemRun, outcome: ItemOutcome) -> None:
    """Request the flight records of ranks that have ended an item in which ranks may have parted."""
    if outcome.has_fault():
        statuses = run.request_statuses(outcome.ended())
        outcome.parts[FEATURE] = {outcome.ranks[index].rank: each.record for index, each in statuses.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_ranks_sections(
    context: Context, cause: Problem, report: pytest.TestReport | None
) -> tuple[str, str] | None:
    """Draw the last collectives of a test that hung, died or called them differently, and of no other."""
    if not (context.outcome.has_fault() and (cause.report is None or cause.is_mismatch or context.diagnosis)):
        return None
    from lockstep.features.timeline.reader import read_timeline
    from lockstep.features.timeline.text import as_text

    # A subtest: its test continues after it.
    until = int(report.stop * 1e9) if report is not None and type(report) is not pytest.TestReport else None
    base = str(context.item.config.invocation_params.dir)
    timeline = read_timeline(str(context.item.nodeid), context.outcome, base, until)
    return None if timeline is None else ("timeline: the last collectives of each rank", as_text(timeline))
