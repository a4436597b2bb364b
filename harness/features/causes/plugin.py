"""The plugin of causes: the end of a run's report groups failures by their cause."""

from __future__ import annotations

import pytest

from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import Options


def pytest_ranks_short_options() -> Options:
    return {
        "causes": {
            "choices": ("auto", "all", "no"),
            "default": "auto",
            "help": "group failures by cause: where several have one (%(default)s), all always, or not",
        },
    }


def pytest_configure(config: pytest.Config) -> None:
    if not (config.pluginmanager.hasplugin(RANK_PLUGIN) or hasattr(config, "workerinput")):
        from lockstep.features.causes.summary import Summary

        config.pluginmanager.register(Summary(config))
