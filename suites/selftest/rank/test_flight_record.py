"""Reading of torch's flight recorder in a rank: what it must not import, and how stacks are shortened."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import RankWorld
from lockstep.rank import torch_internals
from lockstep.rank.flight_record import StackReader
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
