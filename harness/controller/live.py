"""Output of ranks that is shown while a test runs: live logs, `--setup-show`, and records for `--log-file`.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import pytest

from harness.controller.pytest_internals import write_to_log_file
from harness.output import shows_logs
from harness.protocol import Shown


def shows_live(config: pytest.Config) -> bool:
    """Whether ranks may show something on the terminal while a test runs."""
    return shows_logs(config) or bool(config.getoption("setupshow", False))


class LiveOutput:
    """Writes lines of ranks to the terminal or to pytest's log file, with the rank before each."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def show(self, rank: int, shown: Shown) -> None:
        """Write a text of a rank. A process of `pytest -n` has no terminal, as for tests without ranks."""
        text = "".join(f"rank {rank}: {line}\n" for line in shown.text.splitlines())
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if shown.to_file:
            write_to_log_file(self._config, text)
        elif terminal is not None:
            terminal.ensure_newline()
            terminal.write(text, flush=True)
