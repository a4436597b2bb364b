"""Writes what ranks want to be shown at once. Runs in the controller; must not import torch."""

from __future__ import annotations

import pytest

from lockstep.controller.pytest_internals import write_to_log_file
from lockstep.features.live_output.shown import FEATURE, Shown
from lockstep.protocol import Part
from lockstep.world.item_run import ItemRun


class ShownOutput:
    """Writes lines of ranks, with the rank before each, to the terminal or to the log file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_ranks_message(self, run: ItemRun, rank: int, part: Part) -> None:
        if part.feature == FEATURE:
            self._show(run.number_of(rank), part.data)

    def _show(self, rank: int, shown: Shown) -> None:
        """Write a text of a rank. A process of `pytest -n` has no terminal, as for tests without ranks."""
        text = "".join(f"rank {rank}: {line}\n" for line in shown.text.splitlines())
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if shown.to_file:
            write_to_log_file(self._config, text)
        elif terminal is not None:
            terminal.ensure_newline()
            terminal.write(text, flush=True)
