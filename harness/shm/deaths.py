"""The processes of a group that have ended: by their descriptors, which the kernel makes readable then."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence

from lockstep.shm.peer import Peer


class Deaths:
    """Notices when a peer's process ends.

    Args:
        peers: The other ranks.

    Raises:
        OSError: a process is gone, or there are too few descriptors.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._poll = select.poll()
        self._of: dict[int, int] = {}
        self._dead: set[int] = set()
        self._lock = threading.Lock()
        try:
            for peer in peers:
                fd = os.pidfd_open(peer.pid)
                self._of[fd] = peer.rank
                self._poll.register(fd, select.POLLIN)
        except OSError:
            self.close()
            raise

    def ranks(self) -> set[int]:
        """Return the ranks whose process has ended."""
        with self._lock:  # two threads may not poll at once
            for fd, _ in self._poll.poll(0):
                self._dead.add(self._of[fd])
                self._poll.unregister(fd)
            return self._dead

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            for fd in self._of:
                os.close(fd)
            self._of, self._poll = {}, select.poll()
