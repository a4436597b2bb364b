"""What a rank is doing: Python stacks of its threads, and the collective in flight."""

from __future__ import annotations

import json
import linecache
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pluggy
import pytest
import torch
import torch.distributed as dist

from harness.protocol import Doing

WIRE_THREAD = "lockstep-wire"


def describe_rank(main_thread: int, base: str) -> Doing:
    """Describe all threads of this process but the one that asks, the main thread first.

    Args:
        main_thread: its ident.
        base: directory that the user's files are named from.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    main = _frames(frames.pop(main_thread))
    texts = [f"MainThread:\n{_format(main)}"]
    for ident, frame in frames.items():
        if names.get(ident) != WIRE_THREAD:
            texts.append(f"{names.get(ident, ident)}:\n{_format(_frames(frame))}")
    return replace(
        collective_in_flight(), stacks="\n".join(texts), where=_users_line(main).removeprefix(f"{base}/")
    )


def _frames(innermost: FrameType | None) -> list[traceback.FrameSummary]:
    """Summarise a stack, outermost first, without the frames above a pytest phase."""
    linecache.checkcache()
    stack = traceback.StackSummary.extract(traceback.walk_stack(innermost))
    stack.reverse()
    last_of_pytest = max((i for i, frame in enumerate(stack) if _is_pytests(frame.filename)), default=-1)
    return stack[last_of_pytest + 1 :] or list(stack)


def _format(frames: list[traceback.FrameSummary]) -> str:
    return "".join(traceback.format_list(frames))


def _is_pytests(filename: str) -> bool:
    return "/_pytest/" in filename or filename.startswith(str(pluggy.__path__[0]))


def _users_line(frames: list[traceback.FrameSummary]) -> str:
    """Name the innermost line that belongs neither to an installed package nor to Python."""
    for frame in reversed(frames):
        if not _is_installed(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else "?"


def _is_installed(filename: str) -> bool:
    harness = str(Path(__file__).parents[1])
    roots = ("<", harness, sys.prefix, sys.base_prefix, *pluggy.__path__, *pytest.__path__, *torch.__path__)
    return filename.startswith(roots)


def collective_in_flight() -> Doing:
    """Return the oldest collective that has not ended, if there is one; stacks and place are left empty.

    Read from torch's flight recorder, which costs nothing per collective. Each backend has one of its own.
    """
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json" if nccl else "_dump_fr_trace_json")
    try:
        entries: list[dict[str, Any]] = json.loads(dump(True, False)).get("entries", [])
        for entry in entries:
            if not entry["retired"]:
                on_world = entry["process_group"][1] == "default_pg" and not entry["is_p2p"]
                return Doing("", "", _describe(entry), on_world, entry["collective_seq_id"])
    except (KeyError, IndexError, ValueError) as error:  # a private format: say so, but do answer
        return Doing("", "", f"a collective it cannot tell ({type(error).__name__}: {error})")
    return Doing("", "")


def _describe(entry: dict[str, Any]) -> str:
    operation = entry["profiling_name"].split(":")[-1]
    tensors = ", ".join(
        f"{dtype.lower()} {size}"
        for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    )
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return f"{operation} #{number}" + (f" ({tensors})" if tensors else "")
