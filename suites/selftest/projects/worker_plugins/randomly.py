"""The part of pytest-randomly that speaks to workers of pytest-xdist."""


class Sender:
    def pytest_configure_node(self, node):
        node.workerinput["randomly_seed"] = node.config.option.randomly_seed


def pytest_addoption(parser):
    parser.addoption("--randomly-seed", default="default")


def pytest_configure(config):
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(Sender())
    if hasattr(config, "workerinput"):
        config.option.randomly_seed = config.workerinput.get("randomly_seed")
    else:
        config.option.randomly_seed = 12345
