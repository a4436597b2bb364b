"""The plugin of injected faults and of skew: the fixture `faults`, the option `--skew`, the mark `skew`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.backends import meets
from lockstep.features.injection.messages import FEATURE
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.features.injection.expected_faults import ExpectedFaults
    from lockstep.features.injection.injector import Faults
    from lockstep.options import Options
    from lockstep.protocol import Part, Vote
    from lockstep.rank.session import RankSession
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.diagnosis import Diagnosis
    from lockstep.world.item_run import ItemRun
    from lockstep.world.outcome import Died

_SKEW = "harness-skew"
"""Name of the plugin by which a rank delays collectives."""


def pytest_ranks_short_options() -> Options:
    return {
        "skew": {"metavar": "SEED[:MILLISECONDS]", "help": "delay ranks around collectives, and fail races"},
    }


def pytest_ranks_repeated_options() -> Mapping[str, object]:
    return {"ranks_skew": None}


def pytest_configure(config: pytest.Config) -> None:
    """Check the option, and let a rank run all its items by it.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    config.addinivalue_line("markers", "skew(seeds=5, milliseconds=3): run a test under schedules of delays.")
    if config.option.ranks_skew is None:
        return
    from lockstep.features.injection.schedule import Schedule

    try:
        Schedule.parse(config.option.ranks_skew)
    except ValueError as error:
        raise pytest.UsageError(f"--skew {error}") from None
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        _register_skew(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a rank run items by their marks once there is one; refuse those that would do nothing."""
    marked = [item for item in items if item.get_closest_marker("skew") is not None]
    if marked and config.pluginmanager.hasplugin(RANK_PLUGIN):
        _register_skew(config)
    elif marked:
        from lockstep.controller.requests import REFUSAL, Refusal
        from lockstep.reporting.merge import HAS_CASES

        for item in marked:
            item.stash[HAS_CASES] = True  # its seeds
            if why := _why_not(item):
                item.stash[REFUSAL] = Refusal("failed", f"skew: {why}")


def _why_not(item: pytest.Item) -> str:
    """Return why the mark would do nothing, "" if it does something."""
    import unittest  # of few projects

    if item.get_closest_marker("ranks") is None:
        return "the test has no ranks to delay; write @pytest.mark.ranks(2), too"
    is_of_unittest = issubclass(getattr(item, "cls", None) or object, unittest.TestCase)
    if is_of_unittest and item.config.option.ranks_skew is None:
        return "the mark is for functions and plain classes; run this method of unittest with --skew 7"
    return ""


def _register_skew(config: pytest.Config) -> None:
    session: RankSession = config.pluginmanager.get_plugin(RANK_PLUGIN)  # type: ignore[assignment]
    if not config.pluginmanager.hasplugin(_SKEW) and meets(session.world.backend):
        from lockstep.features.injection.skewed_items import SkewedItems

        config.pluginmanager.register(SkewedItems(session.rank, config.option.ranks_skew), _SKEW)


@pytest.fixture(scope="session")  # Hypothesis refuses those of functions
def faults(request: pytest.FixtureRequest) -> Faults:
    """Faults at a rank's collectives: delay, fail, kill, stop, hang, corrupt, drop; and expecting them."""
    session = session_of(request)
    from lockstep.features.injection.injector import faults_of

    return faults_of(session, request.config)


# In the controller: what a test injects and expects, noted in the parts of its run


def pytest_ranks_message(run: ItemRun, rank: int, part: Part) -> None:
    if part.feature == FEATURE:
        _expected(run).handle(rank, part.data)


def pytest_ranks_died(run: ItemRun, rank: int, death: Died) -> str | None:
    return _expected(run).note_death(rank, death)


def pytest_ranks_agreed(run: ItemRun, votes: Sequence[Vote], parts: dict[str, Any]) -> None:
    if FEATURE in run.parts:
        parts[FEATURE] = _expected(run).count_votes(votes)


def pytest_ranks_standstill(run: ItemRun, found: Diagnosis, pending: set[int]) -> set[int] | None:
    return _expected(run).ranks_to_end(found, pending) if FEATURE in run.parts else None


def pytest_ranks_remarks(context: Context) -> Sequence[str]:
    expected: ExpectedFaults | None = context.outcome.parts.get(FEATURE)
    return () if expected is None else expected.remarks(context.outcome)


def _expected(run: ItemRun) -> ExpectedFaults:
    if FEATURE not in run.parts:
        from lockstep.features.injection.expected_faults import ExpectedFaults

        run.parts[FEATURE] = ExpectedFaults(run)
    expected: ExpectedFaults = run.parts[FEATURE]
    return expected
