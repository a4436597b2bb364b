"""The process groups of adopted tests, while the rank's own are out of sight. Runs inside a rank."""

from __future__ import annotations

import sys
from typing import Any

from lockstep.rank.process_group import DefaultGroup
from lockstep.rank.torch_internals import TakenGroups, is_default_timeout, replace_group_maker, take_groups
from lockstep.rank.world_fixture import RankWorld

MAX_KEPT = 4
"""Number of owners that keep their groups for their next item. Usually items of a class follow each other."""


class ForeignGroups:
    """Keeps the groups of the rank and those of adopted tests apart.

    Args:
        group: the rank's default group.
    """

    def __init__(self, group: DefaultGroup) -> None:
        self._group = group
        self._kept: dict[object, TakenGroups] = {}
        """The groups of owners that may have more items, the one that was up longest ago first."""
        self._ended: list[TakenGroups] = []
        self._is_up = False

    def reuse_default(self, world: RankWorld) -> None:
        """From now on give the rank's default group to a test that asks for one like it."""

        def make(
            size: int, rank: int, ranks: Any, backend: Any, store: Any, *args: Any, **options: Any
        ) -> Any:
            wanted = (size, rank, ranks, options.get("device_id"), options.get("backend_options"))
            alike = (
                wanted == (world.size, world.rank, [], None, None)
                and str(backend) in (world.backend, "undefined")
                and is_default_timeout(options.get("timeout"), world.backend)
            )
            if self._is_up and alike:
                return self._group.lend(store), store
            return make_new(size, rank, ranks, backend, store, *args, **options)

        make_new = replace_group_maker(make)

    def enter(self, owner: object) -> None:
        """Hide the rank's groups; put back those that `owner` has kept."""
        self._group.hide()
        self._is_up = True
        self._excepthook = sys.excepthook
        if (kept := self._kept.pop(owner, None)) is not None:
            kept.put_back()

    def end(self) -> None:
        """Make torch forget the test's groups. They live on until all ranks have ended the item.

        Another rank may still connect to them, and must find them.
        """
        self._ended.append(take_groups())

    def leave(self, keep_for: object = None) -> None:
        """Put the rank's groups back; keep the test's for their owner, or end them."""
        groups = self._group.show()
        self._is_up = False
        sys.excepthook = self._excepthook  # each `init_process_group` wraps the one before
        if keep_for is not None:
            self._kept[keep_for] = groups
            if len(self._kept) > MAX_KEPT:
                self._ended.append(self._kept.pop(next(iter(self._kept))))
        else:
            self._ended.append(groups)

    def drop_ended(self) -> None:
        """Shut down what has ended: all ranks are past it."""
        while self._ended:
            self._ended.pop().shut_down()
