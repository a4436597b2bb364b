"""The placement of a world's ranks on the hosts of a run. Runs in the controller; must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.features.hosts.hosts_file import read_hosts_file
from lockstep.specification import Spread


def spread_of(size: int, on: int | None, *, needs_gpus: bool, per_host: int | None) -> Spread | str:
    """Return the hosts of a world, or why there are too few.

    Args:
        size: ranks of the world.
        on: how many hosts it is to be spread over evenly; None: as few as it fits on.
        needs_gpus: whether each rank takes a GPU.
        per_host: of `--ranks-per-host`: ranks that fit on a host without GPUs; None: as many as it has CPUs.
    """
    hosts_file = read_hosts_file()
    hosts = () if hosts_file is None else hosts_file.hosts
    if on is not None and on > max(1, len(hosts)):
        have = "this run has 1" if len(hosts) < 2 else f"this run has {len(hosts)}"
        return f"the test needs {on} hosts, {have}"
    if needs_gpus:
        return _spread(size, on, [len(host.gpus) for host in hosts], can_share=False)
    return _spread(size, on, [per_host or len(host.gpus) or host.cpus for host in hosts], can_share=True)


def _spread(size: int, on: int | None, capacities: Sequence[int], can_share: bool) -> Spread | str:
    """Return the hosts; on CPUs ranks share those that there are."""
    if on is None:
        fitting = [number for number, capacity in enumerate(capacities) if capacity >= size]
        if fitting or len(capacities) < 2:
            return _without_first_alone([(fitting[0] if fitting else 0, size)])
        if sum(capacities) >= size:
            return _without_first_alone(_fill(size, capacities))
        on = len(capacities)
    spread = _evenly(size, min(on, size))
    if not can_share and any(ranks > capacities[number] for number, ranks in spread):
        return f"{size} ranks need a GPU each, the hosts of this run have {', '.join(map(str, capacities))}"
    return _without_first_alone(spread)


def _fill(size: int, capacities: Sequence[int]) -> list[tuple[int, int]]:
    filled = []
    for number, capacity in enumerate(capacities):
        if ranks := min(size, capacity):
            filled.append((number, ranks))
            size -= ranks
    return filled


def _evenly(size: int, on: int) -> list[tuple[int, int]]:
    return [(number, size // on + (number < size % on)) for number in range(on)]


def _without_first_alone(spread: list[tuple[int, int]]) -> Spread:
    return () if len(spread) == 1 and spread[0][0] == 0 else tuple(spread)
