"""The controller's handle on a rank that does not read, or stops as it writes: it is not waited for."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.launch.processes import RankProcess
from harness.protocol import Probe, RankSpec, SessionSpec, WorldKey
from harness.world import handle as module
from harness.world.handle import RankHandle
from harness.world.outcome import Died


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RankHandle, Connection]]:
    """A handle on a rank that is no process, and the rank's end of the wire."""
    monkeypatch.setattr(module, "MESSAGE_WITHIN", 1)
    session = SessionSpec((), "/", (), (), {}, {}, captures=True, measures=False, debugged_rank=None)
    spec = RankSpec(0, WorldKey(1, "gloo", "cpu"), session, 0, str(tmp_path), str(tmp_path))
    ours, theirs = Pipe()
    process: Any = SimpleNamespace(pid=1, sentinel=-1, exitcode=None, join=lambda timeout: None)
    with ours, theirs:
        yield RankHandle(spec, RankProcess(process, ours)), theirs


def test_a_rank_that_does_not_read_does_not_hold_up_who_writes(ends: tuple[RankHandle, Connection]) -> None:
    handle, theirs = ends
    for _ in range(5_000):  # a few hundred fill the wire
        handle.send(Probe(thoroughly=True))
    assert isinstance(theirs.recv(), Probe)


def test_a_rank_that_stops_in_the_middle_of_a_message_counts_as_dead(
    ends: tuple[RankHandle, Connection],
) -> None:
    handle, theirs = ends
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"the rest never comes")
    (died,) = handle.read(handle.sources()[0])
    assert isinstance(died, Died)
    assert died.how == "closed its connection to the controller"
