"""Options of the user's own."""


def pytest_addoption(parser):
    parser.addoption("--mine")
    parser.addoption("--several", nargs="+")
    parser.getgroup("theirs").addoption("--flag", action="store_true")
