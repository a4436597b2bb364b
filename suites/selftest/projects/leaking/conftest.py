"""Reports of each test as JSON, with the processes that it or one before it has noted and that live on."""

import json
import os
import pathlib

import pytest

reports = {}
over = set()


@pytest.fixture
def only(world):
    return world.rank == 1


def of(nodeid):
    start = {"outcomes": {}, "warnings": [], "errors": "", "stderr": "", "alive": []}
    return reports.setdefault(nodeid.split("::", 1)[1], start)


def pytest_warning_recorded(warning_message, nodeid):
    if "RANK" not in os.environ:
        of(nodeid)["warnings"].append([warning_message.category.__name__, str(warning_message.message)])


def pytest_runtest_logreport(report):
    if "RANK" not in os.environ:
        it = of(report.nodeid)
        it["outcomes"][report.when] = report.outcome
        it["stderr"] = report.capstderr
        it["errors"] += report.longreprtext


def pytest_runtest_logfinish(nodeid):
    pids = pathlib.Path("pids.txt")
    over.add(nodeid.split("::", 1)[1])
    if "RANK" not in os.environ and pids.exists():
        noted = [line.split() for line in pids.read_text().splitlines()]
        # The next test may run already.
        of(nodeid)["alive"] = [pid for test, pid in noted if test in over and os.path.exists(f"/proc/{pid}")]


def pytest_sessionfinish():
    if "RANK" not in os.environ:
        pathlib.Path("reports.json").write_text(json.dumps(reports))
