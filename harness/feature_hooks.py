"""Hooks between the core and its features, which may change in any version. Imported by the plugin alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal, Request
    from lockstep.hookspecs import Ending
    from lockstep.launch.processes import Launcher, ProcessLauncher, RankProgram
    from lockstep.marker import RanksMark
    from lockstep.options import Options
    from lockstep.protocol import Part, Progress, RankStatus, RunItem, Vote
    from lockstep.rank.item import Guard
    from lockstep.reporting.problems import Problem
    from lockstep.reporting.rank_reports import Context
    from lockstep.specification import Spread, WorldKey
    from lockstep.world.diagnosis import Diagnosis
    from lockstep.world.item_run import ItemRun
    from lockstep.world.outcome import Died, ItemOutcome
    from lockstep.world.world import Share


@pytest.hookspec
def pytest_ranks_repeated_options() -> Mapping[str, object] | None:
    """Return options that the command which runs a test again repeats, by their dests, and their defaults."""


@pytest.hookspec
def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> bool | None:
    """Return whether a file may have tests on ranks without the word. Called in the controller.

    The server starts with the first file that may, while pytest collects.
    """


@pytest.hookspec
def pytest_ranks_imports(config: pytest.Config, preload: list[str], hints: list[str]) -> None:
    """Change what the server imports once for all ranks. Called in the controller, before it starts.

    Args:
        preload: modules that `ranks_preload` names, which must be importable.
        hints: modules of which those are imported that can be.
    """


@pytest.hookspec
def pytest_ranks_needs_server(config: pytest.Config) -> bool | None:
    """Return whether the server stays up though no test is on ranks. In the controller, after collection."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_admit(config: pytest.Config, key: WorldKey, make_room: Callable[[], None]) -> Share | None:
    """Wait until a world may start, if need be after `make_room` has ended all others that have a share.

    Return its share of the machine. Called in the controller.
    """


@pytest.hookspec
def pytest_ranks_session(config: pytest.Config, args: list[str], parts: dict[str, Any]) -> None:
    """Complete what ranks repeat of this session, before a world starts. Called in the controller.

    Args:
        args: the arguments of pytest in each rank.
        parts: what features send to their half in each rank, by the name of each.
    """


@pytest.hookspec
def pytest_ranks_mark_options() -> Mapping[str, Callable[[RanksMark, Any], Any]] | None:
    """Return options that the mark `ranks` has in addition, each with what checks and returns its value.

    The values stand in `RanksMark.options`. A check gets the mark, with its sizes and the core's options, and
    raises MarkError.
    """


@pytest.hookspec
def pytest_ranks_worker(config: pytest.Config, worker: dict[str, Any]) -> None:
    """Complete the `workerinput` of ranks. Called in the controller, once, before the first world starts."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_items(metafunc: pytest.Metafunc, mark: RanksMark) -> bool | None:
    """Parametrize a test, in the place of one item for each size of its mark, and return True."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_size(
    item: pytest.Item, mark: RanksMark, backend: str, parts: dict[str, Any]
) -> int | Refusal | None:
    """Return how many processes the world of an item has, or refuse it; else its mark says how many.

    Args:
        parts: what features send to ranks with the order. Items whose parts differ here share no fixtures.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_timeout(item: pytest.Item, mark: RanksMark, key: WorldKey) -> float | None:
    """Return seconds for an item in place of those of its mark and the option. Called in the controller."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_launcher(launcher: ProcessLauncher, program: RankProgram) -> Launcher | None:
    """Prepare the launcher of this machine, or return another one. Called in the controller, once."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_spread(mark: RanksMark, key: WorldKey) -> Spread | Refusal | None:
    """Return the hosts of a world, or refuse to run an item. Called in the controller, after collection.

    Args:
        key: the world, without its hosts.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_shared_directory(request: Request) -> str | None:
    """Return the directory that the hosts of a world share, "" if there is none. Called in the controller."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_command() -> Sequence[str] | None:
    """Return the words before pytest's own of the command that runs a test again. In the controller."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_request(item: pytest.Item, mark: RanksMark, request: Request) -> Refusal | None:
    """Refuse to run an item in the world that it requests. Called in the controller, after collection."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_run_and_log(
    item: pytest.Item, nextitem: pytest.Item | None, run: Callable[[], list[pytest.TestReport]]
) -> bool | None:
    """Run an item as often as needed, and log its reports; return whether it was run. In the controller.

    Args:
        run: runs the item once, in a world that no failed run has used, and returns its reports.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_before(item: pytest.Item) -> list[pytest.TestReport] | None:
    """Run what an item needs before it; reports take the place of its run. Called in the controller."""


@pytest.hookspec
def pytest_ranks_order(item: pytest.Item, request: Request, parts: dict[str, Any]) -> None:
    """Add what features send to ranks with the order to run an item. Called in the controller."""


@pytest.hookspec
def pytest_ranks_run_begins(run: ItemRun) -> None:
    """Prepare for what ranks send, which have just got the order. Called in the controller; must be short."""


@pytest.hookspec
def pytest_ranks_message(run: ItemRun, rank: int, part: Part) -> None:
    """Take what a feature on a rank has sent during an item. Called in the controller."""


@pytest.hookspec
def pytest_ranks_part(part: Part) -> None:
    """Take what a feature in the controller has sent by `ItemRun.send`.

    Called in that rank, on the thread that also answers probes: it must not wait for the test.
    """


@pytest.hookspec
def pytest_ranks_answer(run: ItemRun, rank: int, answer: RankStatus | Progress) -> None:
    """Note what a rank has answered to a probe, or what is seen of one that cannot. In the controller."""


@pytest.hookspec
def pytest_ranks_probe(run: ItemRun, silent: set[int]) -> bool | None:
    """Return whether ranks that move must name their line, too. In the controller, before each probe.

    Args:
        silent: the ranks that run the item and have not answered the last probe.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_died(run: ItemRun, rank: int, death: Died) -> str | None:
    """Excuse the death of a rank: return words for the reason, "as the test expects" say, for reports.

    It fails nothing then, and the others go on without the rank. Called in the controller.
    """


@pytest.hookspec
def pytest_ranks_waits(run: ItemRun, statuses: Mapping[int, RankStatus]) -> Mapping[int, str] | None:
    """Return ranks that wait for what no rank has begun, with words for it. Called in the controller.

    The words follow "waits": "to receive float32 [3] from rank 1 (recv at test_a.py:7)", say.

    Args:
        statuses: of ranks that make no progress, or of all at the end of an item.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_standstill(run: ItemRun, found: Diagnosis, pending: set[int]) -> set[int] | None:
    """Return ranks to end, so that others can go on; an empty set to wait. Called in the controller.

    Args:
        found: the standstill of the ranks, which was seen twice.
        pending: the ranks that still run the item.
    """


@pytest.hookspec
def pytest_ranks_agreed(run: ItemRun, votes: Sequence[Vote], parts: dict[str, Any]) -> None:
    """Add what features send to ranks with the votes of all. Called in the controller."""


@pytest.hookspec
def pytest_ranks_run_ended(run: ItemRun) -> None:
    """Forget a run, which has ended or was broken off. Called in the controller."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_idle() -> bool | None:
    """Return whether the rank ends now. Called again and again in each rank that waits for an order."""


@pytest.hookspec
def pytest_ranks_guard(policy: str) -> Guard | None:
    """Return a part of the process that tests must leave as they found it. Called in each rank, once.

    Args:
        policy: of the ini option `ranks_leaks`.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_begin(order: RunItem) -> RunItem | None:
    """Prepare the process for an item, before its file is imported; return an order to follow instead.

    Called in each rank.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_item(item: pytest.Item, order: RunItem) -> pytest.Item | None:
    """Return another item to run in the place of this one. Called in each rank, if the order has parts."""


@pytest.hookspec
def pytest_ranks_short_options() -> Options | None:
    """Return options, added as `--ranks-<name>`, that are `--<name>` too where no other plugin has that."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_run_item(item: pytest.Item, nextitem: pytest.Item | None, order: RunItem) -> bool | None:
    """Run an item, which features wrap. Called in each rank."""


@pytest.hookspec
def pytest_ranks_failed(
    item: pytest.Item, report: pytest.TestReport, error: BaseException, parts: dict[str, Any]
) -> None:
    """Add what features send with the report of a failure. Called in each rank.

    Args:
        error: what was raised.
    """


@pytest.hookspec
def pytest_ranks_called() -> None:
    """Fail a test whose function has returned. Called in each rank."""


@pytest.hookspec(firstresult=True)
def pytest_ranks_example() -> AbstractContextManager[None] | None:
    """Return a context for an example of a property test. Called in each rank."""


@pytest.hookspec
def pytest_ranks_finished(ending: Ending) -> None:
    """Complete the end of an item. Called in each rank."""


@pytest.hookspec
def pytest_ranks_regrouped() -> None:
    """Forget what belongs to old connections: there is a new default group. Called in each rank."""


@pytest.hookspec
def pytest_ranks_outcome(run: ItemRun, outcome: ItemOutcome) -> None:
    """Complete the outcome of an item before it is judged and reported. Called in the controller.

    Not for an item that has passed, on ranks in step, and with which no feature has sent anything.
    """


@pytest.hookspec(firstresult=True)
def pytest_ranks_again(
    item: pytest.Item, order: RunItem, outcome: ItemOutcome, run: Callable[[RunItem], ItemOutcome]
) -> ItemOutcome | None:
    """Run an item again, if its outcome needs that, and return the one to report. Called in the controller.

    Args:
        order: the first one of the item.
        outcome: of the item, which is not clean.
        run: runs an order on a world of the kind that the item requests; raises WorldError if it cannot.
    """


@pytest.hookspec
def pytest_ranks_remarks(context: Context) -> Sequence[str] | None:
    """Return lines for the head of a failure's report. Called in the controller."""


@pytest.hookspec
def pytest_ranks_sections(
    context: Context, cause: Problem, report: pytest.TestReport | None
) -> tuple[str, str] | None:
    """Return the title and the text of a section of a failure's report. Called in the controller.

    Args:
        cause: what went wrong first.
        report: that of the first rank which has one of the failed phase or subtest.
    """


@pytest.hookspec
def pytest_ranks_reported(item: pytest.Item, outcome: ItemOutcome, reports: list[pytest.TestReport]) -> None:
    """Complete the reports of an item before pytest gets them. Called in the controller."""
