"""A plugin that speaks to workers of pytest-xdist as pytest-rerunfailures does."""


def pytest_configure(config):
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Sender())


class Sender:
    def pytest_configure_node(self, node):
        node.workerinput["port"] = 4711
