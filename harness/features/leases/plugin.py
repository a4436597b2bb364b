"""The plugin of leases: a world starts when there is room for it on the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from lockstep.backends.device import Device
from lockstep.hookspecs import RANK_PLUGIN

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal, Request
    from lockstep.features.leases.leases import Lease
    from lockstep.rank.session import RankSession
    from lockstep.specification import WorldKey


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "ranks_at_once",
        "how many ranks may run at once over all pytest runs of this user on this machine",
        "int",
        None,
    )
    parser.addini(
        "ranks_wait", "seconds that a world waits for ranks or GPUs that other runs hold", "float", 600.0
    )


def pytest_configure(config: pytest.Config) -> None:
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    if session is None:
        _check_options(config)
    elif session.rank.spec.held:
        from lockstep.features.leases.lease_store import Recall

        config.pluginmanager.register(Recall(session.rank.spec.held))


def _check_options(config: pytest.Config) -> None:
    for name, unit in (("ranks_at_once", "a whole number"), ("ranks_wait", "a number of seconds")):
        try:
            value = config.getini(name)
        except (TypeError, ValueError, pytest.UsageError) as error:
            raise pytest.UsageError(f"{name}: write {unit} above 0 ({error})") from None
        if value is not None and not value > 0:
            raise pytest.UsageError(f"{name} = {value}: write {unit} above 0")


# In the controller


def pytest_ranks_request(item: pytest.Item, request: Request) -> Refusal | None:
    config, size = item.config, request.key.size
    at_once = config.getini("ranks_at_once")
    if at_once is None or size <= at_once:
        return None
    from lockstep.controller.requests import Refusal

    where = f" in {config.inipath}" if config.inipath else ""
    bound = f"`ranks_at_once = {at_once}`{where}"
    remedy = f"set ranks_at_once to {size} or more, or mark the test for fewer ranks"
    return Refusal(
        "failed", f"a world of {size} rank{'s' if size > 1 else ''} is larger than {bound}: {remedy}"
    )


def pytest_ranks_admit(config: pytest.Config, key: WorldKey, make_room: Callable[[], None]) -> Lease | None:
    if key.spread:  # leases are of one machine; a run has its hosts for itself
        return None
    if Device(key.device).is_cpu and config.getini("ranks_at_once") is None:
        return None
    from lockstep.features.leases.leases import lease_for

    return lease_for(key, config, make_room)
