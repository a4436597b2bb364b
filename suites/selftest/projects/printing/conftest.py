"""Output outside of tests."""

import os


def pytest_sessionstart():
    os.write(1, b"starting\n")


def pytest_sessionfinish():
    print("closing")
