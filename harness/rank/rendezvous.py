"""The launcher's environment on a rank: MASTER_ADDR and MASTER_PORT, and what meets there. Inside a rank.

The port is the world's own for as long as it lives: on the host of rank 0 it is bound and not listened at, so
that nothing else is given it, while a test may listen there. `init_process_group()` that reads the
environment meets in a store of the world instead, a new one each time: torch's last server may still be
closing.

Calls of `init_process_group` are counted where tests make the default group, so that one which other ranks
never make is found.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lockstep.protocol import MEETING, Issued
from lockstep.rank.status import Activity
from lockstep.rank.torch_internals import replace_store_maker, wrap_init_process_group
from lockstep.specification import RankSpec

_HERE = frozenset({"127.0.0.1", "localhost"})


class Rendezvous:
    """Makes the stores of groups that the environment describes, and counts what meets.

    Args:
        activity: of the rank: has the number of the item, and is given the call of `init_process_group` under
            way.
        make_store: returns a store of this world by name and size.
    """

    def __init__(
        self, spec: RankSpec, activity: Activity, make_store: Callable[[str, int], dist.Store]
    ) -> None:
        self._make_store = make_store
        self._master = _HERE if spec.place is None else {spec.place.master}
        self._spec = spec
        self._activity = activity
        self._meetings: Counter[tuple[int, int]] = Counter()

    def install(self) -> None:
        """Set the variables, and serve `env://` and `tcp://` at their port."""
        place = self._spec.place
        os.environ["MASTER_ADDR"] = "127.0.0.1" if place is None else place.master
        os.environ.update(MASTER_PORT=str(self._spec.port))
        self._make_torchs = replace_store_maker(self._make)
        if not self._spec.key.has_group:
            wrap_init_process_group(self._count)

    def _count(self, init: Callable[..., None]) -> Callable[..., None]:
        """Return `init_process_group` that says when this rank is in it, for a group of all ranks."""
        signature = inspect.signature(init)

        @functools.wraps(init)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            last = self._activity.meeting
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # torch says so
                given = {"world_size": 0}
            size = given.get("world_size", -1)
            if (int(os.environ.get("WORLD_SIZE", "0")) if size == -1 else size) != self._spec.key.size:
                return init(*args, **kwargs)
            timeout = given.get("timeout")
            seconds = timeout.total_seconds() if timeout is not None else float("inf")
            number = 1 if last is None else last.number + 1
            meeting = Issued(MEETING, (), number, "init_process_group", (), (), True, seconds)
            self._activity.meeting = meeting
            try:
                return init(*args, **kwargs)
            finally:
                self._activity.meeting = replace(meeting, in_flight=False)

        return wrapper

    def _make(
        self, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> dist.Store:
        """Return a store for one meeting: ranks that meet have met equally often in this item."""
        if port != self._spec.port or hostname not in self._master:
            store: dist.Store = self._make_torchs(hostname, port, rank, world_size, *args, **kwargs)
            return store
        item = self._activity.item
        self._meetings[item, world_size] += 1
        alone = f"-of-{self._spec.rank}" if world_size == 1 else ""
        name = f"meeting-{item}-{world_size}-{self._meetings[item, world_size]}{alone}"
        return self._make_store(name, world_size)
