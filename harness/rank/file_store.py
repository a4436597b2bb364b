"""A store in a file that is looked at often while a rank waits for another. Inside a rank."""

from __future__ import annotations

import datetime
from time import monotonic, sleep  # as they are now: a test may replace those of the module

import torch.distributed as dist

_FIRST_PAUSE, _LONGEST_PAUSE = 5e-5, 2e-3
"""Seconds between two looks at the file: each is half as long again as the one before."""


class EagerFileStore(dist.Store):
    """torch's `FileStore`, which alone would look for a key of another rank every 10 ms.

    Ranks that make a group of gloo wait for such keys (`python benchmarks/harness.py --warm --mesh`).

    Keep it for as long as there is a group or store of torch over it: once Python has no reference to it,
    torch's C++ finds no method, and raises RuntimeError. Not for groups of nccl, whose threads may ask their
    store, too: they would need Python's lock.

    Args:
        path: of the file, in a directory that all ranks have.
        size: number of ranks.
    """

    def __init__(self, path: str, size: int) -> None:
        super().__init__()
        self._file = dist.FileStore(path, size)

    def set(self, key: str, value: str | bytes) -> None:
        self._file.set(key, value)  # type: ignore[arg-type]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._file.compare_set(key, expected, desired)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._file.check(keys)

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there.

        Args:
            timeout: by default that of the store; 0: none.

        Raises:
            torch.distributed.DistStoreError: they were not within it.
        """
        given = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        seconds = given.total_seconds() or float("inf")
        until, pause = monotonic() + seconds, _FIRST_PAUSE
        while not self._file.check(keys):
            if monotonic() > until:
                raise dist.DistStoreError(f"Wait timeout after {seconds:g} s, for {', '.join(keys)}")
            sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def clone(self) -> dist.Store:
        return self  # which threads may share: each call locks the file

    # By these names torch's C++ calls `delete_key` and `num_keys`; for `list_keys` it has no name.

    def deleteKey(self, key: str) -> bool:
        return self._file.delete_key(key)

    def getNumKeys(self) -> int:
        return self._file.num_keys()
