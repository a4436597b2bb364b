"""The plugin of torch.compile on ranks: caches that are kept, and the fixture `compiles`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.compiles import FEATURE, FINDINGS
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.features.compiles.compiles import Compiles
    from lockstep.features.compiles.rank import Compiler
    from lockstep.options import Options
    from lockstep.protocol import Part, RunItem
    from lockstep.rank.session import RankSession
    from lockstep.reporting.rank_reports import Context
    from lockstep.world.item_run import ItemRun

_compiler: pytest.StashKey[Compiler] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_compile_cache",
        "directory that keeps the code that torch.compile makes in ranks, relative to the ini file (default: "
        "a folder in pytest's cache)",
        default="",
    )


def pytest_ranks_short_options() -> Options:
    return {
        "compile-cache": {
            "metavar": "DIR",
            "help": "keep the code that torch.compile makes in ranks in DIR, each rank's in its own folder "
            "(default: that of `ranks_compile_cache`)",
        },
        "compile-cache-clear": {
            "action": "store_true",
            "help": "remove that code before the first test",
        },
    }


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append("lockstep.features.compiles.rank")


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        from lockstep.features.compiles.cache_directory import prepare

        prepare(config)
    else:
        from lockstep.features.compiles.rank import Compiler

        directory = session.rank.spec.session.parts.get(FEATURE, "")
        config.stash[_compiler] = Compiler(session, directory, config.pluginmanager)
        config.stash[_compiler].install()


# In a rank


@pytest.hookimpl(tryfirst=True)  # another feature returns an item
def pytest_ranks_item(item: pytest.Item, order: RunItem) -> None:
    if FEATURE in order.parts:
        from lockstep.features.compiles.rank import CheckedItem

        session: Any = item.config.pluginmanager.get_plugin(RANK_PLUGIN)
        manager = item.config.pluginmanager
        manager.register(CheckedItem(session.rank.wire, manager))


@pytest.fixture
def compiles(request: pytest.FixtureRequest) -> Iterator[Compiles]:
    """The compilations of torch.compile on this rank while the test runs; ranks must compile the same."""
    session_of(request)
    with request.config.stash[_compiler].watched() as watched:
        yield watched


# In the controller


def pytest_ranks_session(config: pytest.Config, parts: dict[str, Any]) -> None:
    from lockstep.features.compiles.cache_directory import cache_directory

    parts[FEATURE] = cache_directory(config)


def pytest_ranks_message(run: ItemRun, rank: int, part: Part) -> None:
    if part.feature == FEATURE:
        place, frame = part.data
        run.parts.setdefault(FEATURE, {}).setdefault(rank, {})[place] = frame
    elif part.feature == FINDINGS:
        run.parts.setdefault(FINDINGS, {})[rank] = part.data


@pytest.hookimpl(trylast=True)
def pytest_ranks_sections(context: Context, report: pytest.TestReport | None) -> tuple[str, str] | None:
    """List what each rank has compiled: under `-v`, and where ranks disagree on it."""
    compiled = context.outcome.parts.get(FEATURE)
    if not compiled:
        return None
    from lockstep.features.compiles.compilation import DISAGREE, described, first_difference

    ranks = range(len(context.outcome.ranks))
    by_rank = {rank: [*dict(sorted(compiled.get(rank, {}).items())).values()] for rank in ranks}
    # A rank that failed, or hung, compiled less than the others: that is no difference.
    common = min(map(len, by_rank.values()))
    difference = first_difference({rank: frames[:common] for rank, frames in by_rank.items()})
    is_reported = report is not None and DISAGREE in report.longreprtext
    if not (difference or is_reported or context.item.config.get_verbosity() > 0):
        return None
    head = f"{DISAGREE}: {difference}\n" if difference else ""
    return "compiled by torch.compile", head + described(by_rank)
