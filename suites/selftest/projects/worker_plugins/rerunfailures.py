"""The part of pytest-rerunfailures that speaks to workers of pytest-xdist."""


def pytest_configure(config):
    config.addinivalue_line("markers", "flaky: is run again")
    if config.pluginmanager.hasplugin("xdist") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Sender())
    elif config.pluginmanager.hasplugin("xdist"):
        open("wrong.txt", "a").write("sees a server of its own in a rank\n")


class Sender:
    def pytest_configure_node(self, node):
        node.workerinput["sock_port"] = 4711


def pytest_runtest_protocol(item):
    if hasattr(item.config, "workerinput"):
        open("wrong.txt", "a").write("runs an item again on one rank\n")
