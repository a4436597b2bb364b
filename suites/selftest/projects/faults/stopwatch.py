"""A plugin of the controller: seconds and growth of the peak of memory from start to end of each item."""

import os
import time

import pytest


def peak():
    with open("/proc/self/status") as status:  # getrusage counts the process that was forked, too
        return int(status.read().split("VmHWM:")[1].split()[0]) // 1024


class Stopwatch:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid):
        self.start, self.peak = time.monotonic(), peak()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        with open("measured.txt", "a") as file:
            file.write(f"{nodeid.split('::')[-1]} {time.monotonic() - self.start} {peak() - self.peak}\n")


def pytest_configure(config):
    if "RANK" not in os.environ:
        config.pluginmanager.register(Stopwatch())
