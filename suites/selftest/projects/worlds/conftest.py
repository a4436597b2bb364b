"""Few warm worlds; a rank that does not start; reports as JSON, by pytest's categories."""

import json
import os
import pathlib

import pytest

import lockstep.world.pool
import lockstep.world.world

lockstep.world.world.CLOSE_WITHIN = 0.1
lockstep.world.pool.MOST_WARM = 2  # few worlds then crowd one out


def pytest_configure():
    if os.environ.get("RANK") == "1" and os.environ["WORLD_SIZE"] == "4":
        raise pytest.UsageError("rank 1 has no licence")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if os.environ.get("RANK") == "1" and item.name == "test_silent":
        return True


def pytest_terminal_summary(terminalreporter):
    by_category = {
        category: [[each.nodeid, getattr(each, "message", "") or each.longreprtext] for each in reports]
        for category, reports in terminalreporter.stats.items()
    }
    pathlib.Path("reports.json").write_text(json.dumps(by_category))
