"""The launcher's environment on a rank: MASTER_ADDR and MASTER_PORT, and what meets there. Inside a rank.

The port is the world's own for as long as it lives: on the host of rank 0 it is bound and not listened at, so
that nothing else is given it, while a test may listen there. `init_process_group()` that reads the
environment meets in a store of the world instead, a new one each time: torch's last server may still be
closing.

Calls of `init_process_group` are counted where tests make the default group, so that one which other ranks
never make is found.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lockstep.protocol import MEETING, Issued
from lockstep.rank.file_store import EagerFileStore
from lockstep.rank.torch_internals import replace_store_maker, wrap_init_process_group
from lockstep.specification import RankSpec

if TYPE_CHECKING:
    from lockstep.place import Place
    from lockstep.rank.status import Activity

NO_TIMEOUT = datetime.timedelta(days=1)
"""Timeout of groups: the controller's deadline ends what hangs, with a better report than torch's own."""
_HERE = frozenset({"127.0.0.1", "localhost"})


class Stores:
    """Makes the stores in which ranks of a world meet.

    Ranks of one host meet in a file of the world's private directory: no port, no host name. Those of several
    meet at rank 0, which listens at the one address that leads to the others.
    """

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._server: dist.Store | None = None
        self._kept: list[EagerFileStore] = []

    def make(self, name: str, size: int, is_eager: bool = False) -> dist.Store:
        """Return a store for one meeting.

        Args:
            is_eager: whether an `EagerFileStore` may be kept for it until the process ends.
        """
        if self._server is not None:
            return dist.PrefixStore(name, self._server)
        path = f"{self._spec.directory}/{name}"
        if not is_eager or self._spec.key.device != "cpu":  # nccl is for other devices
            return dist.FileStore(path, size)
        self._kept.append(EagerFileStore(path, size))
        return self._kept[-1]

    def reach_server(self, place: Place) -> None:
        """Connect to the store at rank 0, of ranks on several hosts; rank 0 serves it."""
        if self._server is not None:
            return
        listening = None
        if self._spec.rank == 0:
            listening = socket.create_server((place.address, place.store_port)).detach()
        self._server = dist.TCPStore(
            place.master,
            place.store_port,
            is_master=listening is not None,
            timeout=NO_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listening,
        )


class Rendezvous:
    """Makes the stores of groups that the environment describes, and counts what meets.

    Args:
        activity: of the rank: has the number of the item, and is given the call of `init_process_group` under
            way.
    """

    def __init__(self, spec: RankSpec, activity: Activity, stores: Stores) -> None:
        self._stores = stores
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
        return self._stores.make(name, world_size)
