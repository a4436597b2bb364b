"""Unit tests of the plugin of leases: which worlds need a lease, and which are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller.requests import Refusal, Request
from lockstep.features.leases import leases, plugin
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.specification import WorldKey

CPU, GPU = WorldKey(3, "gloo", "cpu"), WorldKey(3, "nccl", "cuda")


def config_of(at_once: int | None = None, wait: float = 600.0, session: Any = None, path: str = "") -> Any:
    registered: list[Any] = []
    return SimpleNamespace(
        getini={"ranks_at_once": at_once, "ranks_wait": wait}.get,
        inipath=path,
        registered=registered,
        pluginmanager=SimpleNamespace(get_plugin={RANK_PLUGIN: session}.get, register=registered.append),
    )


@pytest.mark.parametrize(
    ("at_once", "path", "bound"),
    [
        (None, "", None),
        (3, "", None),
        (2, "", "`ranks_at_once = 2`"),
        (1, "/x.ini", "`ranks_at_once = 1` in /x.ini"),
    ],
)
def test_a_world_that_never_fits_is_refused(at_once: int | None, path: str, bound: str | None) -> None:
    item: Any = SimpleNamespace(config=config_of(at_once, path=path))
    refusal = plugin.pytest_ranks_request(item, Request(CPU, False, 60.0))
    if bound is None:
        assert refusal is None
    else:
        assert isinstance(refusal, Refusal)
        assert refusal.outcome == "failed"
        remedy = "set ranks_at_once to 3 or more, or mark the test for fewer ranks"
        assert refusal.why == f"a world of 3 ranks is larger than {bound}: {remedy}"


def test_worlds_on_this_machine_have_a_lease_where_ranks_or_devices_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lease(key: WorldKey, config: Any, make_room: Any) -> Any:
        return key, config, make_room

    monkeypatch.setattr(leases, "lease_for", lease)
    config = config_of()
    admitted: Any = plugin.pytest_ranks_admit(config, GPU, print)
    assert admitted == (GPU, config, print)
    assert plugin.pytest_ranks_admit(config, CPU, print) is None
    bound: Any = config_of(4)
    assert plugin.pytest_ranks_admit(bound, CPU, print) == (CPU, bound, print)  # type: ignore[comparison-overlap]
    spread = WorldKey(3, "nccl", "cuda", spread=((0, 2), (1, 1)))
    assert plugin.pytest_ranks_admit(bound, spread, print) is None


def test_a_rank_of_a_leased_world_ends_when_that_is_recalled() -> None:
    def registered(held: str) -> list[Any]:
        config = config_of(0, session=SimpleNamespace(rank=SimpleNamespace(spec=SimpleNamespace(held=held))))
        plugin.pytest_configure(config)
        return list(config.registered)

    assert registered("") == []
    (recall,) = registered("/leases/1.lease")
    assert recall._recalled == "/leases/1.recalled"


@pytest.mark.parametrize(
    ("at_once", "wait", "why"),
    [
        (0, 1.0, "ranks_at_once = 0: write a whole number above 0"),
        (1, 0.0, "ranks_wait = 0.0: write a number of seconds above 0"),
        (1, float("nan"), "ranks_wait = nan: write a number of seconds above 0"),
    ],
)
def test_a_bound_is_above_0(at_once: int, wait: float, why: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^{why}$"):
        plugin.pytest_configure(config_of(at_once, wait))
    plugin.pytest_configure(config_of(None, 0.1))
