"""Notes of the pytest sessions of a run: `main`, workers of pytest-xdist, and their ranks."""

import os


def pytest_sessionstart():
    name = os.environ.get("PYTEST_XDIST_WORKER", "main") + "-" + os.environ.get("RANK", "none")
    with open("sessions.txt", "a") as file:
        file.write(f"{name}\n")
