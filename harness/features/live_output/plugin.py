"""The plugin of live output: ranks send what pytest shows while a test runs, the controller writes it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from lockstep.features.live_output import FEATURE, Shown
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.protocol import Part
    from lockstep.rank.session import RankSession


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the session changes the options of the user
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None:
        from lockstep.features.live_output.rank import SentOutput

        config.pluginmanager.register(SentOutput(session.rank, config))
    return (yield)


def pytest_ranks_imports(hints: list[str]) -> None:
    hints.append("lockstep.features.live_output.rank")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin(RANK_PLUGIN):
        config.pluginmanager.register(ShownOutput(config))


class ShownOutput:
    """Writes lines of ranks, with the rank before each, to the terminal or to the log file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_ranks_message(self, part: Part) -> None:
        """Write a text of a rank. A process of `pytest -n` has no terminal, as for tests without ranks."""
        if part.feature != FEATURE:
            return
        from lockstep.features.live_output.pytest_internals import write_to_log_file

        shown: Shown = part.data
        text = "".join(f"rank {shown.rank}: {line}\n" for line in shown.text.splitlines())
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if shown.to_file:
            write_to_log_file(self._config, text)
        elif terminal is not None:
            terminal.ensure_newline()
            terminal.write(text, flush=True)
