import random


def pytest_addoption(parser):
    parser.addoption("--order", default="", choices=("", "reversed", "shuffled"))


def pytest_collection_modifyitems(config, items):
    order = config.getoption("order")
    if order == "reversed":
        items.reverse()
    elif order == "shuffled":
        random.Random(7).shuffle(items)
