"""Plugins of all suites: engines under test, and pytester for the harness's tests of itself.

`--draw K/N` runs part K of N of what is collected.
"""

import argparse
import re
import subprocess
import zlib
from pathlib import Path

from lockstep.hookspecs import RANK_PLUGIN

pytest_plugins = ["lockstep.conformance.plugin", "pytester"]


def pytest_addoption(parser):
    parser.addoption(
        "--draw", type=part, metavar="K/N", help="run part K of N, counted from 1; the parts differ by commit"
    )


def part(text):
    """Return (K, N) of "K/N"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, size = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= size:
        raise argparse.ArgumentTypeError(f"{text!r}: write K/N, such as 1/10, with K from 1 to N")
    return number, size


def pytest_collection_modifyitems(config, items):
    drawn = config.getoption("draw")
    if drawn is None or config.pluginmanager.hasplugin(RANK_PLUGIN):  # a rank runs what is sent to it
        return
    number, size = drawn
    command = ["git", "-C", Path(__file__).parent, "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    parts = [[], []]
    for item in items:
        place = zlib.crc32(f"{commit.strip()} {item.nodeid}".encode()) % size
        parts[place == number - 1].append(item)
    left_out, items[:] = parts
    config.hook.pytest_deselected(items=left_out)
