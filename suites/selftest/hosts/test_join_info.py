"""Unit tests of the store of torchrun as a way for the join info: a process that answers questions."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.features.hosts import join_info
from lockstep.features.hosts.join_info import JoinInfo, SharedFile, Store
from lockstep.features.hosts.launchers import NodePlace

INFO = JoinInfo("10.0.0.1", 5, b"s")
PLACE = NodePlace(0, 2, "torchrun", store=("h", 29))
NOT_HANDED = (
    "the store of torchrun at h:29 handed over no invitation: {}. Was torchrun started on all hosts, "
)


PIPES: list[io.TextIOWrapper] = []


@pytest.fixture(autouse=True)
def pipes() -> Iterator[None]:
    """End the pipes of processes after a test."""
    yield
    while PIPES:
        PIPES.pop().close()


class Process:
    """The process of a store, with answers that it has given already."""

    def __init__(self, *answers: object, error: str = "") -> None:
        reading, writing = os.pipe()
        os.write(writing, "".join(f"{json.dumps(answer)}\n" for answer in answers).encode())
        self._writing, self._error = writing, error
        if answers[-1:] != ("...",):
            os.close(writing)
        self.stdout, self.stdin = open(reading), io.StringIO()  # noqa: SIM115
        PIPES.append(self.stdout)
        self.done: list[object] = []
        self.is_stuck = False

    def kill(self) -> None:
        self.done.append("killed")
        self.is_stuck = False
        os.close(self._writing)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.done.append(timeout)
        if self.is_stuck:
            raise subprocess.TimeoutExpired("store", timeout or 0.0)
        return "", self._error

    def asked(self) -> list[Any]:
        return [json.loads(line) for line in self.stdin.getvalue().splitlines()]


def store_of(
    monkeypatch: pytest.MonkeyPatch, process: Process, place: NodePlace = PLACE
) -> tuple[Store, dict[str, Any]]:
    given: dict[str, Any] = {}

    def started(command: list[str], **options: Any) -> Process:
        given.update(options, command=command)
        return process

    monkeypatch.setattr(join_info.subprocess, "Popen", started)
    return Store(place), given


@pytest.mark.parametrize(
    ("node", "has_agent_store", "is_master"), [(0, True, "0"), (0, False, "1"), (1, False, "0")]
)
def test_the_store_is_served_where_torchrun_does_not(
    monkeypatch: pytest.MonkeyPatch, node: int, has_agent_store: bool, is_master: str
) -> None:
    place = NodePlace(node, 2, "torchrun", store=("h", 29), has_agent_store=has_agent_store)
    _, given = store_of(monkeypatch, Process(), place)
    module = ["-m", "lockstep.features.hosts.join_info"]
    assert given["command"] == [sys.executable, *module, "h", "29", is_master]
    assert given["start_new_session"] is given["text"] is True


def test_join_info_goes_through_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process("has imported torch", INFO.pack(), INFO.pack())
    store, _ = store_of(monkeypatch, process)
    store.publish(INFO, time.monotonic() + 100)
    assert store.find(0.0) == INFO
    (verb, seconds, text), short = process.asked()
    assert (verb, text, short) == ("set", INFO.pack(), ["get", 1.0])
    assert 90 < seconds <= 100
    store.close()
    assert process.done == [join_info.END_WITHIN]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("", "no answer in time"),
        ("Traceback\n  line\nDistNetworkError: timed out.\n", "DistNetworkError: timed out"),
    ],
)
def test_a_store_that_ends_is_named_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, error: str, why: str
) -> None:
    store, _ = store_of(monkeypatch, Process("has imported torch", error=error))
    with pytest.raises(LaunchError) as refused:
        store.find(0.0)
    assert str(refused.value).startswith(NOT_HANDED.format(why))


def test_a_store_without_an_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_info, "IMPORT_WITHIN", 0.0)
    process = Process("...")
    process.stdout.readline()
    store, _ = store_of(monkeypatch, process)
    with pytest.raises(LaunchError) as refused:
        store.find(0.0)
    assert str(refused.value).startswith(NOT_HANDED.format("no answer in time"))
    assert process.done == ["killed", None]
    assert process.asked() == []


def test_a_store_that_still_waits_is_ended_at_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process("...")
    process.is_stuck = True
    store, _ = store_of(monkeypatch, process)
    store.close()
    assert process.done == [join_info.END_WITHIN, "killed", None]


@pytest.mark.parametrize("is_master", [True, False])
def test_questions_are_answered_from_the_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_master: bool
) -> None:
    made: list[Any] = []

    class OfTorch(dict[str, str]):
        def __init__(self, host: str, port: int, **options: Any) -> None:
            made.append((host, port, options))

        def set(self, key: str, text: str) -> None:
            self[key] = text

        def wait(self, keys: list[str], patience: Any) -> None:
            made.append((keys, patience.total_seconds()))

        def get(self, key: str) -> Any:
            return self[key].encode()

    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(TCPStore=OfTorch))  # type: ignore[arg-type]
    lines = [["set", 3.0, "text"], ["get", 4.0]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(line)}\n" for line in lines)))
    join_info._serve_store("127.0.0.1", 0, is_master)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        "has imported torch",
        "text",
        "text",
    ]
    (host, port, options), waited = made
    assert (host, port, waited) == ("127.0.0.1", 0, (["lockstep/hosts/join_info"], 4.0))
    listening = options.pop("master_listen_fd")
    assert options.pop("timeout").total_seconds() == 3.0
    assert options == {"is_master": is_master, "wait_for_workers": False}
    if is_master:
        with socket.socket(fileno=listening) as made_for_it:
            assert made_for_it.getsockname()[0] == "127.0.0.1"
    else:
        assert listening is None


# The file that all hosts see


def test_a_file_that_is_not_there_yet_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = SharedFile(NodePlace(1, 2, "srun", job="7/x.0"))
    slept: list[float] = []

    def appears(seconds: float) -> None:
        slept.append(seconds)
        SharedFile(NodePlace(0, 2, "srun", job="7/x.0")).publish(INFO, 0.0)

    monkeypatch.setattr(join_info, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=appears))
    assert file.find(1.0) == INFO
    assert slept == [join_info.LOOK_EVERY]
