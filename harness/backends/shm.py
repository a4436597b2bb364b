"""shm: shared memory of one host. A world of another backend may have loaded `lockstep.shm`, too."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from lockstep.backends.backend import Backend


class Shm(Backend):
    name = "shm"
    devices = ("cpu",)
    module = "lockstep.shm"
    takes_devices = False
    spans_hosts = False
    connects = True
    broken_connection = r"\b(?:GroupAborted|PeerLost): (?:.*? (gone|left|aborted|failed)\b)?"

    @property
    def _loaded(self) -> Any:
        return sys.modules.get(self.module)

    def close_connections(self) -> None:
        if self._loaded:
            self._loaded.abort_all()

    def limit_record(self, most: int) -> None:
        if self._loaded:  # the server may have imported it before the size was known
            self._loaded.keep(most)

    def record(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._loaded.record() if self._loaded else []
        return found

    def observe(self, observer: Callable[[Any], None]) -> bool:
        if self._loaded:
            self._loaded.observe(observer)
        return bool(self._loaded)

    def wait_of(self, thread: threading.Thread) -> object | None:
        return self._loaded.waits.get(thread.ident) if self._loaded else None
