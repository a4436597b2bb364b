"""A backend of torch.distributed, as worlds use it: facts for the controller, and what a rank does with it.

The facts need no torch, which methods import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch.distributed as dist


class Backend:
    """A backend of torch.distributed as worlds use it; each one has a subclass.

    Attributes:
        name: torch.distributed's.
        devices: types of device that a rank's tensors can be on, the default first.
        module: the one that registers it with torch.distributed, if that does not know it by itself.
        lacks: words of `marker.NEEDS` for what it does not offer.
        takes_devices: whether each rank needs an accelerator of its own.
        spans_hosts: whether ranks of one group may be on several hosts.
        meets: whether ranks are processes that meet; else one process stands for any of them.
        connects: whether the world's own group has connections that `close_connections` closes.
        broken_connection: pattern of what a collective raises where a peer has closed its connection.
    """

    name: str
    devices: tuple[str, ...]
    module: ClassVar[str] = ""
    lacks: ClassVar[frozenset[str]] = frozenset()
    takes_devices: bool = True
    spans_hosts: ClassVar[bool] = True
    meets: ClassVar[bool] = True
    connects: ClassVar[bool] = False
    broken_connection: ClassVar[str] = ""

    # On a rank

    def store(self) -> dist.Store | None:
        """Return the store that a group must be made with; None for any."""
        return None

    def prepare(self) -> None:
        """Prepare this process before it joins a group."""

    def barrier(self, group: dist.ProcessGroup, device: Any) -> None:
        """Wait until all ranks of the group are here."""
        import torch.distributed as dist

        dist.barrier(group)

    def abort(self, is_of_world: bool) -> None:
        """Abort the groups of this backend that can be aborted as such.

        Args:
            is_of_world: whether the world's group is of this backend; else only a test's own may be.
        """

    def close_connections(self) -> None:
        """Close the connections of all groups of this backend in this process."""

    def detach(self) -> None:
        """Leave the connections to the rank, in a forked child of it."""

    def leave(self, destroy: Callable[[], None]) -> None:
        """Leave the world's group at the end of the process, which closes its connections."""

    def release(self, *lists: list[dist.ProcessGroup]) -> None:
        """Empty lists with the last references to groups that were destroyed."""

    # What it keeps of its calls, if torch's flight recorder has them not

    def limit_record(self, most: int) -> None:
        """Keep that many calls."""

    def record(self) -> list[dict[str, Any]]:
        """Return its calls in the shape of torch's flight recorder, oldest first."""
        return []

    def observe(self, observer: Callable[[Any], None]) -> bool:
        """Call the observer with each call that begins; return whether there is anything to observe."""
        return False

    def wait_of(self, thread: threading.Thread) -> object | None:
        """Return what a thread waits for in a wait that wakes up by itself, as a value; else None."""
        return None


class AcceleratorBackend(Backend):
    """A backend that its maker has made for one type of accelerator: each rank needs one of its own."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.devices = (device,)

    def barrier(self, group: dist.ProcessGroup, device: Any) -> None:
        import torch.distributed as dist

        dist.barrier(group, device_ids=[device.index])

    def leave(self, destroy: Callable[[], None]) -> None:
        """Destroy the group: without that torch warns of nccl."""
        destroy()
