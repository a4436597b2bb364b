"""Reading of torch's flight recorder in a rank: what it must not import, and how stacks are shortened."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import RankWorld
from lockstep.flight_entries import DEFAULT_GROUP, FlightRecord
from lockstep.protocol import Issued
from lockstep.rank import flight_record as module
from lockstep.rank import torch_internals
from lockstep.rank.flight_record import (
    MAX_RECORDED,
    StackReader,
    issued_since,
    keep_stack,
    limit_records,
    read_record,
)
from lockstep.rank.torch_internals import phases_by_code, recorded_calls
from lockstep.shm.record import CallRecorder, Entry


@pytest.mark.parametrize("fails", [False, True])
def test_reading_the_record_does_not_import_the_compiler(monkeypatch: Any, fails: bool) -> None:
    """While torch names the lines of stacks it looks for its compiler, whose import takes seconds."""

    def dump(*_: bool) -> bytes:
        assert "_inductor" in vars(torch)  # else the attribute would be imported
        return b"no pickle" if fails else pickle.dumps({"entries": []})

    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    monkeypatch.delitem(vars(torch), "_inductor", raising=False)
    monkeypatch.setattr(torch_internals.dist, "is_initialized", lambda: False)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace", dump)
    assert recorded_calls() == []
    assert "torch._inductor" not in sys.modules
    assert "_inductor" not in vars(torch)


def stack_in(phase: str) -> list[dict[str, Any]]:
    """Return the stack of a function that runs in a phase, in the form of torch's flight recorder."""
    found: list[dict[str, Any]] = []

    def note(*_: Any) -> None:
        frame = sys._getframe()
        while frame is not None:
            code = frame.f_code
            found.append({"filename": code.co_filename, "name": code.co_name, "line": frame.f_lineno})
            frame = frame.f_back  # type: ignore[assignment]

    class Optimizer(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            note()

    weight = nn.Parameter(torch.ones(1))
    module = nn.Linear(1, 1)
    match phase:
        case "forward":
            module.register_forward_hook(note)
            module(weight)
        case "backward":
            weight.register_hook(note)
            weight.sum().backward()
        case "grad":
            weight.register_hook(note)
            torch.autograd.grad(weight.sum(), [weight])
        case "optimizer":
            Optimizer([weight], {}).step()
        case _:
            note()
    return found


@pytest.mark.parametrize("phase", ["forward", "backward", "grad", "optimizer", ""])
def test_a_stack_shows_the_phase_of_a_step(phase: str) -> None:
    """If it fails with a new torch: what public function's code is in the stack of that phase."""
    entry: dict[str, Any] = {"frames": stack_in(phase)}
    StackReader(phases_by_code()).shorten(entry)
    assert entry["phase"] == {"grad": "backward"}.get(phase, phase)
    assert [frame["filename"] for frame in entry["frames"]][-1] == __file__
    assert all("site-packages" not in frame["filename"] for frame in entry["frames"])


@pytest.mark.ranks(2)
def test_calls_have_the_stack_of_the_test(world: RankWorld) -> None:
    world.barrier()
    frames = recorded_calls()[-1]["frames"]
    assert any(frame["filename"] == __file__ for frame in frames)


def test_calls_of_shm_are_numbered_as_torch_numbers_its_own() -> None:
    recorder = CallRecorder(2)
    for _ in range(3):
        recorder.add(Entry("barrier", 0, [], []))
    assert [entry.as_dict()["record_id"] for entry in recorder.entries] == [1, 2]


# In this process


def frame_of(file: str, function: str = "f") -> dict[str, Any]:
    return {"filename": file, "name": function, "line": 3}


PHASES = {
    ("/site-packages/torch/b.py", "backward"): "backward",
    ("/site-packages/torch/f.py", "forward"): "forward",
    ("/site-packages/torch/o.py", "step"): "optimizer",
}
BACKWARD, FORWARD, STEP = (frame_of(file, function) for file, function in PHASES)
OF_PYTEST = f"/site-packages{module.pytest_internals.FOLDER}python.py"
FIXTURE, CALL, OTHER = (
    frame_of(OF_PYTEST, name) for name in ("pytest_fixture_setup", "pytest_pyfunc_call", "other")
)
USERS, PACKAGE, UNKNOWN = frame_of("/home/a.py"), frame_of("/site-packages/p.py"), frame_of("??")
FALSE_FIXTURE = frame_of("/site-packages/p.py", "pytest_fixture_setup")


@pytest.mark.parametrize(
    ("frames", "kept", "phase"),
    [
        ([USERS, PACKAGE, UNKNOWN, USERS], [USERS, USERS], ""),
        ([USERS, FORWARD, BACKWARD, STEP], [USERS], "backward"),
        ([FORWARD, USERS, STEP], [USERS], "optimizer"),
        ([FIXTURE, FORWARD], [], "fixture"),
        ([USERS, FORWARD, FIXTURE], [USERS], "forward"),
        ([USERS, CALL, USERS, FORWARD], [USERS], ""),
        ([USERS, OTHER, USERS], [USERS, USERS], ""),
        ([USERS, FALSE_FIXTURE, USERS], [USERS, USERS], ""),
        ([USERS, FIXTURE, USERS], [USERS], "fixture"),
        (None, [], ""),
    ],
)
def test_a_stack_is_shortened_to_frames_and_a_phase(
    frames: list[dict[str, Any]] | None, kept: list[dict[str, Any]], phase: str
) -> None:
    reader = StackReader(PHASES)
    for _ in range(2):  # what is known of files is kept
        entry: dict[str, Any] = {"frames": frames}
        reader.shorten(entry)
        assert entry == {"frames": kept, "phase": phase}


@pytest.mark.parametrize(("thread", "phase"), [("pt_autograd_0", "backward"), ("other", ""), (None, "")])
def test_threads_of_autograd_are_in_backward(thread: object, phase: str) -> None:
    entry: dict[str, Any] = {"thread_name": thread}
    StackReader({}).shorten(entry)
    assert entry["phase"] == phase


def test_a_kept_stack_ends_at_the_hook_that_calls_the_test() -> None:
    entry = SimpleNamespace(frames=[])

    def pytest_pyfunc_call() -> None:
        inner()

    def inner() -> None:
        keep_stack(entry)

    pytest_pyfunc_call()
    assert [frame["name"] for frame in entry.frames] == ["inner", "pytest_pyfunc_call"]
    assert {frame["filename"] for frame in entry.frames} == {__file__}
    line = inner.__code__.co_firstlineno + 1
    assert entry.frames[0]["line"] == line


@pytest.mark.parametrize(
    ("value", "most"), [(None, MAX_RECORDED), ("7", 7), ("999999999", 999_999_999)], ids=str
)
def test_the_number_of_calls_that_are_kept_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, value: str | None, most: int
) -> None:
    environ = {} if value is None else {"TORCH_FR_BUFFER_SIZE": value}
    monkeypatch.setattr(module, "os", SimpleNamespace(environ=environ))
    assert limit_records() == most
    assert environ == {"TORCH_FR_BUFFER_SIZE": str(most)}


@pytest.mark.parametrize("value", ["many", "-1", "1000000000", ""])
def test_a_number_of_calls_that_torch_cannot_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", value)
    with pytest.raises(ValueError, match=r"TORCH_FR_BUFFER_SIZE=.*: set it to the number of calls"):
        limit_records()


class Recorders:
    """The records of torch and of a backend, and the default group of a rank with two groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_torch: list[dict[str, Any]] = []
        self.own: list[dict[str, Any]] = []
        self.hidden: set[int] = set()
        self.joins = [(1, (0, 1))]
        self.environ = {"TORCH_FR_BUFFER_SIZE": "8"}
        default = SimpleNamespace(group_name="0")
        members = [(default, (0, 1)), (SimpleNamespace(group_name="5"), (1, 2))]
        self.group: Any = SimpleNamespace(
            members=lambda: members, has_begun=lambda at: at not in self.hidden, joins=self.joins
        )
        empty, backend = (SimpleNamespace(record=record) for record in (list, lambda: self.own))
        monkeypatch.setattr(module, "os", SimpleNamespace(environ=self.environ))
        monkeypatch.setattr(module, "BACKENDS", {"a": empty, "b": backend})
        monkeypatch.setattr(module, "recorded_collectives", lambda: self.of_torch)
        monkeypatch.setattr(module, "recorded_calls", lambda: self.of_torch)
        monkeypatch.setattr(module, "phases_by_code", lambda: PHASES)
        monkeypatch.setattr(module.dist.group.__class__, "WORLD", default, raising=False)
        monkeypatch.setattr(module, "time", SimpleNamespace(time_ns=lambda: 99))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Recorders:
    return Recorders(monkeypatch)


def entry_of(at: int, number: int = 1, group: str = "", pg_id: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "profiling_name": "gloo:all_reduce",
        "process_group": (group, "mesh_dp") if group else ("0", "default_pg"),
        "pg_id": pg_id,
        "time_created_ns": at,
        "collective_seq_id": number,
        "is_p2p": False,
        "retired": True,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 3]],
        **changes,
    }


ISSUED = Issued(DEFAULT_GROUP, (0, 1), 4, "all_reduce", ("float",), ((2, 3),), in_flight=False)


def test_collectives_are_listed_and_earlier_ones_counted(recorders: Recorders) -> None:
    recorders.of_torch = [
        entry_of(5, 2),
        entry_of(9, 3),
        entry_of(9, 7, is_p2p=True),
        entry_of(10, 4),
        entry_of(11, 5, "5", 1, retired=False, timeout_ms=1500),
        entry_of(12, 6, "6", 2),
        entry_of(13, 8, is_p2p=True),
    ]
    issued, before = issued_since(10, recorders.group)
    assert issued == (
        ISSUED,
        replace(ISSUED, group="5", ranks=(1, 2), number=5, in_flight=True, timeout=1.5),
        replace(ISSUED, group="6", ranks=(), number=6),
    )
    assert before == {DEFAULT_GROUP: 3, "5": 0, "6": 0}


def test_groups_whose_calls_may_be_forgotten_have_no_count(recorders: Recorders) -> None:
    recorders.environ["TORCH_FR_BUFFER_SIZE"] = "2"
    recorders.of_torch = [entry_of(10)]
    assert issued_since(10, recorders.group)[1] == {DEFAULT_GROUP: 0}
    recorders.of_torch = [entry_of(10), entry_of(11)]
    assert issued_since(10, recorders.group)[1] == {}
    recorders.own, recorders.of_torch = recorders.of_torch, []
    assert issued_since(10, recorders.group)[1] == {}
    assert issued_since(11, recorders.group)[1] == {DEFAULT_GROUP: 1}
    del recorders.environ["TORCH_FR_BUFFER_SIZE"]
    assert issued_since(10, recorders.group)[1] == {DEFAULT_GROUP: 0}


def test_calls_of_a_backend_are_put_among_those_of_torch(recorders: Recorders) -> None:
    recorders.of_torch = [entry_of(10, 1), entry_of(12, 2)]
    recorders.own = [entry_of(11, 1, "5", 0, profiling_name="shm:barrier", is_p2p=False)]
    issued, _ = issued_since(10, recorders.group)
    assert [(each.group, each.op) for each in issued] == [
        (DEFAULT_GROUP, "all_reduce"),
        ("5", "barrier"),
        (DEFAULT_GROUP, "all_reduce"),
    ]


def test_calls_of_groups_that_are_gone_do_not_count(recorders: Recorders) -> None:
    recorders.of_torch = [
        entry_of(3, 1, "5", 1),
        entry_of(4, 2, "5", 2),
        entry_of(10, 1),
        entry_of(11, 9, "5", 2),
        entry_of(12, 1, "6", 3),
    ]
    recorders.hidden = {4, 12}
    issued, before = issued_since(10, recorders.group)
    assert [(each.group, each.number) for each in issued] == [(DEFAULT_GROUP, 1), ("5", 9)]
    assert before == {DEFAULT_GROUP: 0, "5": 2}


def test_a_group_that_takes_over_a_name_has_it_alone(recorders: Recorders) -> None:
    recorders.of_torch = [entry_of(9, 1, "5", 1), entry_of(11, 2, "5", 1), entry_of(12, 1, "5", 2)]
    issued, before = issued_since(10, recorders.group)
    assert [each.number for each in issued] == [1]
    assert before == {"5": 0}


def test_a_record_has_the_calls_of_a_test_with_groups_and_times(recorders: Recorders) -> None:
    recorders.hidden = {12}
    gone = entry_of(12, 1, "6", 3, frames=[USERS, FORWARD])
    recorders.of_torch = [entry_of(9, 3, "5", 1), entry_of(10, 4, is_p2p=True), gone]
    expected = [
        {**entry_of(10, 4, is_p2p=True), "frames": [], "phase": ""},
        {**gone, "frames": [USERS], "phase": "forward"},
    ]
    before = {DEFAULT_GROUP: 0, "5": 3}
    groups = {DEFAULT_GROUP: (0, 1)}
    record = read_record(10, recorders.group)
    assert record == FlightRecord(tuple(expected), groups, before, 10, 99, ((1, (0, 1)),))


def test_a_record_has_the_latest_calls(recorders: Recorders) -> None:
    recorders.of_torch = [entry_of(at) for at in range(MAX_RECORDED + 10)]
    entries = read_record(5, recorders.group).entries
    assert [entry["time_created_ns"] for entry in entries] == [*range(10, MAX_RECORDED + 10)]
