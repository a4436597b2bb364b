"""The record of the calls of a process, in the shape of torch's flight recorder."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

from lockstep.shm import collectives, p2p
from lockstep.shm.collectives import Collectives
from lockstep.shm.p2p import Mailbox
from lockstep.shm.record import CallRecorder, Entry

record = importlib.import_module("lockstep.shm.record")  # the package has a function of that name


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallRecorder:
    own = CallRecorder(100)
    for module in (record, collectives, p2p):
        monkeypatch.setattr(module, "recorder", own)
    return own


def without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if "time_" not in key}


def test_a_collective_is_recorded_as_torch_does(recorder: CallRecorder, pair: list[Collectives]) -> None:
    pair[0].description, pair[0].generation = "of a test", 5
    before = time.time_ns()
    waiting = pair[0].all_gather_single(torch.zeros(2, 2, 3), torch.zeros(2, 3))
    expected = {
        "record_id": 0,
        "pg_id": 5,
        "process_group": ["g", "of a test"],
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 0,
        "profiling_name": "shm:all_gather_single",
        "input_sizes": [[2, 3]],
        "input_dtypes": ["Float"],
        "output_sizes": [[2, 2, 3]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": False,
        "timeout_ms": 20_000,
        "is_p2p": False,
        "peer": -1,
        "frames": [],
    }
    (found,) = record.record()
    assert without_times(found) == expected
    assert recorder.entries[0].group_size == 2
    assert before <= found["time_created_ns"] == found["time_discovered_started_ns"] <= time.time_ns()
    assert found["time_discovered_completed_ns"] is None
    pair[1].all_gather_single(torch.zeros(4, 3), torch.zeros(2, 3))
    assert waiting.try_complete()
    found = record.record()[0]
    assert without_times(found) == expected | {"state": "completed", "retired": True}
    assert found["time_created_ns"] <= found["time_discovered_completed_ns"] <= time.time_ns()


def test_messages_are_counted_apart_and_name_the_peer(
    recorder: CallRecorder, pair: list[Collectives]
) -> None:
    pair[0].description, pair[0].generation = "of a test", 5
    box = Mailbox(pair[0].channel, pair[0])
    pair[0].barrier()
    box.receive(torch.zeros(2, dtype=torch.int64), 1, 7)
    box.send(torch.zeros(3, dtype=torch.bool), 1, 7)
    call, received, sent = record.record()
    assert [entry["record_id"] for entry in (call, received, sent)] == [0, 1, 2]
    assert [entry["op_id"] for entry in (call, received, sent)] == [0, 1, 2]
    assert (call["input_sizes"], call["profiling_name"]) == ([], "shm:barrier")
    common = {
        "pg_id": 5,
        "process_group": ["g", "of a test"],
        "collective_seq_id": 0,
        "timeout_ms": 20_000,
        "is_p2p": True,
        "peer": 1,
    }
    nothing: dict[str, list[object]] = {"input_sizes": [], "input_dtypes": []}
    received_into = {"output_sizes": [[2]], "output_dtypes": ["Long"]}
    assert received.items() >= {**common, **nothing, **received_into, "p2p_seq_id": 1}.items()
    assert received["profiling_name"] == "shm:recv"
    assert (sent["input_sizes"], sent["input_dtypes"]) == ([[3]], ["Bool"])
    assert (sent["output_sizes"], sent["profiling_name"]) == ([], "shm:send")
    assert sent.items() >= {**common, "p2p_seq_id": 2}.items()


def test_only_the_latest_calls_are_kept(recorder: CallRecorder) -> None:
    for number in range(5):
        recorder.add(Entry("barrier", number, [], []))
    record.keep(2)
    assert [entry["record_id"] for entry in record.record()] == [3, 4]
    recorder.add(Entry("barrier", 5, [], []))
    assert [entry["record_id"] for entry in record.record()] == [4, 5]
    assert CallRecorder(3).entries.maxlen == 3


def test_an_observer_is_called_until_it_is_taken_away(recorder: CallRecorder) -> None:
    seen: list[str] = []
    end = record.observe(lambda entry: seen.append(entry.op))
    recorder.add(Entry("broadcast", 1, [], []))
    end()
    recorder.add(Entry("reduce", 2, [], []))
    assert seen == ["broadcast"]


def test_groups_are_numbered_from_0() -> None:
    recorder = CallRecorder(1)
    assert [recorder.number_group() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "kept"),
    [("17", 17), ("", 2000), ("-5", 2000), ("many", 2000), ("999999999", 999999999), ("1" * 10, 2000)],
)
def test_torchs_variable_says_how_many_calls_are_kept(
    monkeypatch: pytest.MonkeyPatch, text: str, kept: int
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", text)
    assert record._buffer_size() == kept
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    assert record._buffer_size() == 2000


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "Double"),
        (torch.float16, "Half"),
        (torch.bfloat16, "BFloat16"),
        (torch.int32, "Int"),
        (torch.int16, "Short"),
        (torch.int8, "Char"),
        (torch.uint8, "Byte"),
        (torch.float8_e5m2, "Float8_e5m2"),
    ],
)
def test_dtypes_have_torchs_names(dtype: torch.dtype, name: str) -> None:
    entry = Entry("send", 1, [torch.zeros(1, dtype=dtype)], []).as_dict()
    assert entry["input_dtypes"] == [name]
