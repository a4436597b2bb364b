"""Private names of pytest's log and terminal, as seen in 9.2. Used on both sides; must not import torch."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.config import create_terminal_writer


def write_to_log_file(config: pytest.Config, text: str) -> None:
    """Write to the file of `--log-file`, between pytest's own records.

    If it moves: the handler that `LoggingPlugin.set_log_path` gives another stream.
    """
    plugin: Any = config.pluginmanager.get_plugin("logging-plugin")
    handler: Any = getattr(plugin, "log_file_handler", None)
    if getattr(handler, "stream", None) is not None:
        with handler.lock:
            handler.stream.write(text)
            handler.flush()


def replace_log_handlers(config: pytest.Config, live: Any, file: Any) -> None:
    """Put handlers in the place of those for live logs and for the log file, with their formats.

    None keeps what is there. If it moves: what `LoggingPlugin` attaches around the whole run of tests.
    """
    plugin: Any = config.pluginmanager.get_plugin("logging-plugin")
    for name, handler in (("log_cli_handler", live), ("log_file_handler", file)):
        if handler is not None and hasattr(plugin, name):
            handler.setFormatter(getattr(plugin, name).formatter)
            setattr(plugin, name, handler)


def make_terminal_writer(config: pytest.Config, stream: Any) -> Any:
    """Return a writer of pytest's on a stream, as `Config.get_terminal_writer` does on the terminal."""
    return create_terminal_writer(config, stream)
