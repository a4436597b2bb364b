"""The plugin of worlds over several hosts: where the ranks of a test run, and the run's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.options import Options
    from lockstep.place import Place
    from lockstep.protocol import RunItem
    from lockstep.rank.session import RankSession
    from lockstep.specification import RankSpec


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    for name, what in (
        ("hosts", "spread each test evenly over N hosts, unless its mark says how many"),
        ("per-host", "how many ranks fit on a host without GPUs (default: as many as it has CPUs)"),
    ):
        group.addoption(f"--ranks-{name}", type=int, metavar="N", help=what)


def pytest_ranks_short_options() -> Options:
    return {
        "shared-dir": {"metavar": "DIR", "help": "directory that all hosts see, for `world.shared_tmp_path`"},
    }


def pytest_ranks_repeated_options() -> Mapping[str, object]:
    return dict.fromkeys(("ranks_hosts", "ranks_per_host", "ranks_shared_dir"))


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        from lockstep.features.hosts.controller import HostsController, check_options

        check_options(config)
        config.pluginmanager.register(HostsController(config))
    elif session.rank.spec.place is not None:
        config.pluginmanager.register(RankOnHost(session.rank.spec, session.rank.spec.place))


class RankOnHost:
    """Gives a rank the paths of its host."""

    def __init__(self, spec: RankSpec, place: Place) -> None:
        self._spec = spec
        self._place = place

    @pytest.hookimpl(trylast=True)
    def pytest_ranks_begin(self, order: RunItem) -> RunItem:
        place = self._place
        if place.moved:
            following = order.next_item and (order.next_item[0], place.path(order.next_item[1]))
            order = replace(order, path=place.path(order.path), next_item=following)
        if place.number and len(place.hosts) == 1 and order.preparation is None:
            shared = f"{self._spec.directory}/shared/{Path(order.shared_tmp_path).name}"
            order = replace(order, shared_tmp_path=shared)  # this host alone needs to see it
        return order
