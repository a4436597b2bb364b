"""The example database as ranks share it: rank 0 reads and writes it, the others are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from hypothesis.database import ExampleDatabase

Fetch = Callable[[bytes, list[bytes] | None], list[bytes]]
"""Given a key, and what rank 0 has read under it (None elsewhere): what all ranks agree on."""


class LockstepDatabase(ExampleDatabase):
    """One state of a database, the same on all ranks. What is changed is written when the run is over.

    Until then a world may be lost and its run begun anew, and must then find what was there at first.

    Args:
        database: the user's; on ranks other than 0 it is left alone.
        is_writer: whether this is rank 0.
    """

    def __init__(self, database: ExampleDatabase, is_writer: bool, agree: Fetch) -> None:
        super().__init__()
        self._database = database
        self._is_writer = is_writer
        self._agree = agree
        self._known: dict[bytes, dict[bytes, None]] = {}
        self._changes: list[tuple[str, bytes, bytes]] = []

    def __repr__(self) -> str:
        return repr(self._database)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return list(self._values(key))

    def save(self, key: bytes, value: bytes) -> None:
        self._values(key)[value] = None
        self._changes.append(("save", key, value))

    def delete(self, key: bytes, value: bytes) -> None:
        self._values(key).pop(value, None)
        self._changes.append(("delete", key, value))

    def write(self) -> None:
        """Make the changes in the user's database."""
        changes, self._changes = self._changes, []
        for change, key, value in changes if self._is_writer else ():
            getattr(self._database, change)(key, value)
        if self._is_writer and changes:  # one that writes in the background ends with the process
            with contextlib.suppress(Exception):
                list(self._database.fetch(changes[-1][1]))

    def has(self, key: bytes) -> bool:
        """Whether there was anything under the key, as far as it was asked for."""
        return bool(self._known.get(key))

    def _values(self, key: bytes) -> dict[bytes, None]:
        if key not in self._known:
            read = list(self._database.fetch(key)) if self._is_writer else None
            self._known[key] = dict.fromkeys(self._agree(key, read))
        return self._known[key]
