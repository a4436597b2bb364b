def pytest_addoption(parser):
    parser.addoption("--mine", type=int)
