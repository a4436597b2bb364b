"""Takes its time to report a test, and then notes it: the next one must not have begun before."""

import time
from pathlib import Path

import pytest


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):  # ranks have it
        session.config.pluginmanager.register(Slow())


class Slow:
    def pytest_runtest_logreport(self, report):
        name = report.nodeid.rpartition("::")[2]
        if report.when == "teardown" and not name.startswith("test_after"):
            time.sleep(0.1)
            with Path("reported.txt").open("a") as file:
                file.write(f"{name}\n")


@pytest.fixture
def breaks_in_set_up(world):
    assert world.rank == 0, "as it should"


@pytest.fixture
def breaks_in_tear_down(world):
    yield
    assert world.rank == 0, "as it should"
