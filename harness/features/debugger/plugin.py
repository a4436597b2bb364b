"""The plugin of the debugger: `--rank-pdb`, `--rank-debugpy`, and what `breakpoint()` does in other ranks."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption(
        "--rank-pdb",
        type=int,
        metavar="RANK",
        help="debug rank RANK at its failures and breakpoints; the others wait, without a deadline",
    )
    group.addoption(
        "--rank-debugpy",
        metavar="RANK[:PORT]",
        help="rank RANK waits until an IDE attaches to debugpy at PORT (default: a free one, shown), "
        "and stops at its breakpoints; the others wait, without a deadline",
    )


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append("lockstep.features.debugger.rank")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the debugger of a run in the controller, or refuse pytest's own, which reaches no rank."""
    options = config.option
    if config.pluginmanager.hasplugin(RANK_PLUGIN):
        return
    if options.rank_pdb is not None or options.rank_debugpy is not None:
        from lockstep.features.debugger.controller import Debugging

        config.pluginmanager.register(Debugging(config))
    elif options.usepdb or options.trace:
        from lockstep.features.debugger.controller import NoDebugging

        config.pluginmanager.register(NoDebugging())


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None:
        from lockstep.features.debugger.rank import plug_in

        plug_in(config, session.rank)
    return (yield)
