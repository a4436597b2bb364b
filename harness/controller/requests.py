"""Requests of marked items for a world, and refusals of those that this run or this machine cannot satisfy.

Runs in the controller; imports torch only where accelerators are requested.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest

from lockstep.backends import BACKENDS, devices_of, meets, objects_of, takes_devices
from lockstep.backends.device import Device
from lockstep.bounds import MOST_PROCESSES
from lockstep.controller.pytest_internals import make_report
from lockstep.controller.rerun import rerun_line
from lockstep.marker import NEEDS, MarkError, RanksMark, read_mark, size_of
from lockstep.options import default_backend
from lockstep.specification import Spread, WorldKey


@dataclass(frozen=True, slots=True)
class Request:
    """A world for one item."""

    key: WorldKey
    fresh: bool
    timeout: float
    parts: dict[str, Any] = field(default_factory=dict)
    """Parts that `pytest_ranks_size` adds to the order."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason an item cannot run, and its outcome."""

    outcome: Literal["skipped", "failed"]
    why: str


REFUSAL = pytest.StashKey[Refusal]()
"""Key of an item that a feature refuses to run, on ranks or in the controller."""
REQUEST = pytest.StashKey[Request | Refusal]()
"""Key of each item that runs on ranks, once items are collected."""


def request_of(item: pytest.Item, size: int | None = None) -> Request | Refusal | None:
    """Return the world that an item requests; None if it runs in the controller, as in any project.

    Args:
        size: of the world, in the place of the one in its mark: for what runs before the item.
    """
    if isinstance(item, pytest.DoctestItem):  # has the mark of its module, and cannot use the world
        return None
    if (refusal := item.stash.get(REFUSAL, None)) is not None:
        return refusal
    try:
        mark = read_mark(item)
        return None if mark is None else _resolve(item, mark, size)
    except MarkError as error:
        # Functions were checked when collected; methods of unittest, and marks that hooks add, were not.
        return Refusal("failed", str(error))


def _resolve(item: pytest.Item, mark: RanksMark, size: int | None) -> Request | Refusal:
    config = item.config
    backend = mark.backend or default_backend(config)
    lacks = {word for each in objects_of(backend) for word in each.lacks}
    lacking = sorted(lacks.intersection(mark.needs))
    if lacking and mark.backend is None:
        return Refusal("skipped", f"the test needs {NEEDS[lacking[0]]}, which {backend} does not offer")
    parts: dict[str, Any] = {}
    if size is None:
        found = config.hook.pytest_ranks_size(item=item, mark=mark, backend=backend, parts=parts)
        if isinstance(found, Refusal):
            return found
        size = size_of(item, mark) if found is None else int(found)
    if size > MOST_PROCESSES:
        larger = (f"{name} worlds (backend={name!r}) are larger" for name in BACKENDS if not meets(name))
        remedy = ", ".join(larger)
        return Refusal("failed", f"ranks({size}): {MOST_PROCESSES} ranks at most under {backend}; {remedy}")
    device = Device(config.getoption("ranks_device") or devices_of(backend)[0])
    if device.type not in devices_of(backend):
        return Refusal("skipped", f"the backend {backend} does not work with --device {device.type}")
    key = WorldKey(size, backend, device.type, mark.group)
    spread: Spread | Refusal = (meets(backend) and config.hook.pytest_ranks_spread(mark=mark, key=key)) or ()
    if isinstance(spread, Refusal):
        return spread
    key = replace(key, spread=spread)
    need = size if takes_devices(backend) else 1
    if not device.is_cpu and not spread and need > (have := device.count()):
        lack = f"need {need} {device.unit}s, this machine has {have}"
        if mark.backend is None:
            lack += "; run with --backend gloo" if device.type in BACKENDS["gloo"].devices else ""
        return Refusal("skipped", f"{size} ranks under {backend} {lack}")
    seconds: float | None = config.hook.pytest_ranks_timeout(item=item, mark=mark, key=key)
    timeout = seconds or mark.timeout or config.getoption("world_timeout")
    request = Request(key, mark.fresh or config.getoption("fresh_worlds"), timeout, parts)
    refusal: Refusal | None = config.hook.pytest_ranks_request(item=item, mark=mark, request=request)
    return refusal or request


def report_refusal(item: pytest.Item, refusal: Refusal) -> list[pytest.TestReport]:
    """Return the reports of an item that cannot run."""
    longrepr: object = refusal.why
    if refusal.outcome == "skipped":
        longrepr = (str(item.path), (item.location[1] or 0) + 1, f"Skipped: {refusal.why}")
    setup = make_report(item, "setup", refusal.outcome, longrepr)
    if refusal.outcome == "failed":
        setup.user_properties.append(("rerun", rerun_line(item)))
    return [setup, make_report(item, "teardown", "passed")]
