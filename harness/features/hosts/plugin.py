"""The plugin of worlds over several hosts: where the ranks of a test run, and the run's options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import Options, add_long_names

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

_OPTIONS: Options = {
    "shared-dir": {"metavar": "DIR", "help": "directory that all hosts see, for `world.shared_tmp_path`"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    add_long_names(parser, _OPTIONS)
    group = parser.getgroup("ranks")
    for name, what in (
        ("hosts", "spread each test evenly over N hosts, unless its mark says how many"),
        ("per-host", "how many ranks fit on a host without GPUs (default: as many as it has CPUs)"),
    ):
        group.addoption(f"--ranks-{name}", type=int, metavar="N", help=what)


def pytest_ranks_short_options() -> Options:
    return _OPTIONS


def pytest_ranks_repeated_options() -> Mapping[str, object]:
    return dict.fromkeys(("ranks_hosts", "ranks_per_host", "ranks_shared_dir"))


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        from lockstep.features.hosts.controller import HostsController, check_options

        check_options(config)
        config.pluginmanager.register(HostsController(config))
    elif session.rank.spec.place is not None:
        from lockstep.features.hosts.rank import RankOnHost

        config.pluginmanager.register(RankOnHost(session.rank.spec, session.rank.spec.place))
