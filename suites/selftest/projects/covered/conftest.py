import os


def pytest_unconfigure():
    if "RANK" in os.environ:
        os.write(1, b"closing\n")
