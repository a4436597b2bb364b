"""A plugin: it shows what the controller has imported and started by the end of the run."""

import os
import pathlib
import sys


def pytest_terminal_summary(terminalreporter):
    children = pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    terminalreporter.line(f"torch: {'torch' in sys.modules}, children: {len(children)}")
