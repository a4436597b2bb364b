"""The plugin of progress: a status line on a terminal, and elsewhere a plain line now and then."""

from __future__ import annotations

import pytest

from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import Options


def pytest_ranks_short_options() -> Options:
    return {
        "no-progress": {"action": "store_true", "help": "show nothing of a test on ranks while it runs"},
    }


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.progress.controller import FollowedRuns

        config.pluginmanager.register(FollowedRuns(config))
