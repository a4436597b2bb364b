"""A rank's share in what its world has leased of the machine. Imported only where there are leases."""

from __future__ import annotations

import os

from harness.launch.lease_store import LEASE, RECALLED, hold


class RankLease:
    """Held from the rank's first moments to its end, whatever end that is: then only may others have it."""

    def __init__(self, path: str) -> None:
        self._recalled = f"{path}.{RECALLED}"
        self._keeper = hold(f"{path}.{LEASE}")

    def is_recalled(self) -> bool:
        """Whether another world waits for it, and the controller cannot use this one any more."""
        return os.path.exists(self._recalled)
