"""Output shown while a test runs: live logs, `--setup-show`, records for `--log-file`, and progress.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import os

import pytest

from lockstep.controller.progress import Progress
from lockstep.controller.pytest_internals import write_to_log_file
from lockstep.protocol import Shown
from lockstep.world.glance import Glance


class LiveOutput:
    """Writes lines of ranks, with the rank before each, to the terminal or to the log file; and progress."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._progress: Progress | None = None

    def show(self, rank: int, shown: Shown) -> None:
        """Write a text of a rank. A process of `pytest -n` has no terminal, as for tests without ranks."""
        text = "".join(f"rank {rank}: {line}\n" for line in shown.text.splitlines())
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if shown.to_file:
            write_to_log_file(self._config, text)
        elif terminal is not None:
            terminal.ensure_newline()
            terminal.write(text, flush=True)

    def look(self, glance: Glance) -> bool:
        """Show how far the test has come; return whether to ask its ranks where they are."""
        if self._progress is None:  # what other plugins do of the terminal is known by now
            self._progress = Progress(self._config, os.environ)
        return self._progress.look(glance)

    def look_away(self) -> None:
        """Remove what `look` shows of a test."""
        if self._progress is not None:
            self._progress.end()
