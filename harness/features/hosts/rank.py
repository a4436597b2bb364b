"""Orders for a rank in a run on several hosts, with the paths of the rank's host. Inside a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lockstep.place import Place
from lockstep.protocol import RunItem
from lockstep.specification import RankSpec


class RankOnHost:
    """Gives a rank the paths of its host."""

    def __init__(self, spec: RankSpec, place: Place) -> None:
        self._spec = spec
        self._place = place

    def pytest_ranks_received(self, order: RunItem) -> RunItem:
        place = self._place
        if place.moved:
            following = order.next_item and (order.next_item[0], place.path(order.next_item[1]))
            order = replace(order, path=place.path(order.path), next_item=following)
        if place.number and len(place.hosts) == 1 and order.preparation is None:
            shared = f"{self._spec.directory}/shared/{Path(order.shared_tmp_path).name}"
            order = replace(order, shared_tmp_path=shared)  # this host alone needs to see it
        return order
