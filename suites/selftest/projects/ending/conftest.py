"""A time limit, as a plugin with limits of its own implements it."""

import os
import signal

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    if item.name == "test_b" and "RANK" not in os.environ:
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the plugin's time is over", pytrace=False))
        signal.alarm(1)
    return (yield)
