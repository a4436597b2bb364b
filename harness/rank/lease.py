"""A rank's share in what its world has leased of the machine. Imported only where there are leases."""

from __future__ import annotations

import os

from harness.launch.ledger import ASKED, LEASE, hold


class RankLease:
    """Held from the rank's first moments to its end, whatever end that is: then only may others have it."""

    def __init__(self, path: str) -> None:
        self._asked = f"{path}.{ASKED}"
        self._keeper = hold(f"{path}.{LEASE}")

    def is_asked_back(self) -> bool:
        """Whether another world waits for it, and the controller cannot use this one any more."""
        return os.path.exists(self._asked)
