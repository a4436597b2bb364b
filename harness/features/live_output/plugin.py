"""The plugin of live output: ranks send what pytest shows while a test runs, the controller writes it."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the session changes the options of the user
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, object, object]:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is not None:
        from lockstep.features.live_output.rank import SentOutput

        config.pluginmanager.register(SentOutput(session.rank, config))
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin(RANK_PLUGIN):
        from lockstep.features.live_output.controller import ShownOutput

        config.pluginmanager.register(ShownOutput(config))
