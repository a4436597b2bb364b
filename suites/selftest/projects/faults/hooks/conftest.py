"""Hooks that raise on rank 1."""

import os

import pytest

ON_RANK_1 = os.environ.get("RANK") == "1"


def pytest_runtest_setup(item):
    if ON_RANK_1 and item.name == "test_setup":
        raise ValueError("in setup")


def pytest_runtest_call(item):
    if ON_RANK_1 and item.name == "test_call":
        raise ValueError("in call")


def pytest_runtest_teardown(item):
    if ON_RANK_1 and item.name == "test_teardown":
        raise ValueError("in teardown")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if ON_RANK_1 and item.name == "test_makereport" and call.when == "call":
        raise ValueError("in makereport")
    return report


def pytest_runtest_logreport(report):
    if ON_RANK_1 and report.nodeid.endswith("::test_logreport") and report.when == "call":
        raise ValueError("in logreport")


def pytest_runtest_logstart(nodeid):
    if ON_RANK_1 and nodeid.endswith("::test_logstart"):
        raise ValueError("in logstart")


def pytest_runtest_logfinish(nodeid):
    if ON_RANK_1 and nodeid.endswith("::test_logfinish"):
        raise ValueError("in logfinish")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if ON_RANK_1 and item.name == "test_protocol":
        raise ValueError("in protocol")
    if ON_RANK_1 and item.name == "test_protocol_exits":
        raise SystemExit("in protocol")
    if ON_RANK_1 and item.name == "test_protocol_stops":
        pytest.exit("in protocol")


def pytest_fixture_setup(request):
    if ON_RANK_1 and request.node.name == "test_fixture_setup":
        raise ValueError("in fixture_setup")


def pytest_report_to_serializable(report):
    if ON_RANK_1 and report.nodeid.endswith("::test_serialise") and report.when == "call":
        raise ValueError("in serialise")


def pytest_generate_tests(metafunc):
    if ON_RANK_1 and metafunc.definition.name == "test_generate":
        raise ValueError("in generate_tests")


def pytest_itemcollected(item):
    if ON_RANK_1 and "test_import_by_hook" in item.nodeid:
        raise ValueError("in itemcollected")
