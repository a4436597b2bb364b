"""Holds the report of a test until a rank has noted something in the next one, and notes whether it has.

Some reports change the list of tests.
"""

import os
import time
from pathlib import Path

import pytest

HELD = {"test_first": "printed-1", "test_before_death": "about-to-die-1", "test_before_other": "never-1"}
STOPS = dict.fromkeys(("test_stops", "test_interrupts", "test_before_unmarked"), "begun-1")


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # ranks have it
        holder = Holder(session, float(os.environ.get("HOLD_FOR", "20")))
        session.config.pluginmanager.register(holder)  # after the controller: its hooks are called first


class Holder:
    def __init__(self, session, seconds):
        self._session = session
        self._seconds = seconds
        self._added = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        self._added = [item for item in items if item.name == "test_added"]
        items[:] = [item for item in items if item not in self._added]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        return True if item.name == "test_passed_over" else None

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" and name in HELD | STOPS:
            note = Path(f"{(HELD | STOPS)[name]}.txt")
            others = [Path("begun-0.txt")] if name == "test_interrupts" else []
            until = time.monotonic() + (self._seconds if "never" not in note.name else 0.2)
            while not all(each.exists() for each in (note, *others)) and time.monotonic() < until:
                time.sleep(0.01)
            with Path("held.txt").open("a") as held:
                held.write(f"{name} {note.exists()}\n")
            if name == "test_stops":
                self._session.shouldstop = "the project's own reason"
        if report.when == "call" and name == "test_removes":
            self._session.items[:] = [item for item in self._session.items if item.name != "test_removed"]
        if report.when == "call" and name == "test_stays":
            self._session.items += self._added

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        if nodeid.endswith("::test_interrupts"):
            raise KeyboardInterrupt

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self, nodeid):
        if nodeid.endswith("::test_stops_at_once"):
            self._session.shouldstop = "the project's own reason"
