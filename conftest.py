"""Plugins of all suites: engines under test, and pytester for the harness's tests of itself.

`--draw N` runs one claim of N.
"""

import subprocess
import zlib
from pathlib import Path

import pytest

from lockstep.hookspecs import RANK_PLUGIN

pytest_plugins = ["lockstep.conformance.plugin", "pytester"]


def pytest_addoption(parser):
    parser.addoption("--draw", type=int, metavar="N", help="run one claim of N, others with each commit")


def pytest_collection_modifyitems(config, items):
    number = config.getoption("draw")
    if number is None or config.pluginmanager.hasplugin(RANK_PLUGIN):  # a rank runs what is sent to it
        return
    if number < 1:
        raise pytest.UsageError(f"--draw={number}: write a whole number from 1 on; one claim of so many runs")
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    parts = [[], []]
    for item in items:
        parts[zlib.crc32(f"{commit.strip()} {item.nodeid}".encode()) % number == 0].append(item)
    left_out, items[:] = parts
    config.hook.pytest_deselected(items=left_out)
