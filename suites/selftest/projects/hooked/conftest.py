"""Hooks that run the session, a fixture, and a report."""

import os

import pytest


def pytest_runtestloop(session):
    mine = [item for item in session.items if "elsewhere" not in item.name]
    for item, following in zip(mine, [*mine[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return True


@pytest.fixture(scope="module")
def module(request):
    yield
    open("ended.txt", "a").write(f"{request.module.__name__} ")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.name == "test_reported":
        report.rank, report.stage = os.environ["RANK"], {"what": ("is", call.when)}
        report.cannot_be_sent = lambda: 0
    return report


def pytest_runtest_logreport(report):
    if "RANK" not in os.environ and "test_reported" in report.nodeid:
        text = report.cannot_be_sent.split(" at ")[0]
        open("reports.txt", "a").write(f"{report.rank} {report.stage} {text}\n")
