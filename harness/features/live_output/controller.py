"""Writes what ranks want to be shown at once. Runs in the controller; must not import torch."""

from __future__ import annotations

import pytest

from lockstep.controller.pytest_internals import write_to_log_file
from lockstep.features.live_output.shown import FEATURE, Shown
from lockstep.protocol import Part


class ShownOutput:
    """Writes lines of ranks, with the rank before each, to the terminal or to the log file."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_ranks_message(self, part: Part) -> None:
        """Write a text of a rank. A process of `pytest -n` has no terminal, as for tests without ranks."""
        if part.feature != FEATURE:
            return
        shown: Shown = part.data
        text = "".join(f"rank {shown.rank}: {line}\n" for line in shown.text.splitlines())
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if shown.to_file:
            write_to_log_file(self._config, text)
        elif terminal is not None:
            terminal.ensure_newline()
            terminal.write(text, flush=True)
