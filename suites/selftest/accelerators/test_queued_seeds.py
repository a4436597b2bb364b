"""Seeds that torch queues for accelerators which were never used, with the stack of the call."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from lockstep.features.accelerators import torch_internals as module
from lockstep.features.accelerators.torch_internals import _LateStack


def queued_stacks(device: Any) -> list[Any]:
    return [calls[1] for calls in device._lazy_seed_tracker.get_calls() if calls]


@pytest.mark.ranks(1)
def test_on_ranks_no_stack_is_formatted(world: Any) -> None:
    torch.manual_seed(0)
    (stack,) = queued_stacks(torch.xpu)
    assert isinstance(stack, _LateStack)
    assert "\n    torch.manual_seed(0)\n" in "".join(stack)


@pytest.mark.parametrize("kind", ["cuda", "mtia", "xpu"])
def test_a_queued_seed_has_a_stack_that_is_formatted_late(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = getattr(torch, kind)
    for each in (torch.cuda, torch.mtia, torch.xpu):
        monkeypatch.setattr(each, "traceback", traceback)
    monkeypatch.setattr(device, "is_initialized", lambda: False)
    monkeypatch.setattr(device, "_lazy_seed_tracker", type(device._lazy_seed_tracker)())

    def queued() -> Any:
        device.manual_seed_all(3)
        (stack,) = queued_stacks(device)
        return stack

    stacks = []
    for step in (lambda: None, module.format_stacks_late):
        step()
        stacks.append(queued())
    at_once, late = stacks
    assert isinstance(late, _LateStack)
    assert "".join(late) == "".join(at_once)
    assert "\n    stacks.append(queued())\n" in "".join(late)
