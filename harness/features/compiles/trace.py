"""Reading of torch's structured trace: the records that dynamo and inductor write as they compile.

Runs in a rank. The records are those that `TORCH_TRACE` writes to a file, for `tlparse`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.features.compiles.compilation import (
    Frame,
    GraphBreak,
    graph_lines,
    in_one_line,
    without_addresses,
)
from lockstep.tracebacks import is_installed

_CACHES = {"fx_graph_cache": "FX graph", "aotautograd_cache": "AOT autograd"}
_BREAK_AT = re.compile(r"Graph break in user code at (\S+:\d+)")
_IN_STACK = re.compile(r'  File "([^"]+)", line (\d+), in ')


class TraceReader(logging.Handler):
    """Makes `Frame`s of the records of a trace.

    Args:
        base: directory that the user's files are named from.
        changed: called with the place of a frame in `frames`, and the frame, when it is compiled.

    Attributes:
        frames: in the order of their compilation.
    """

    def __init__(self, base: str, changed: Callable[[int, Frame], None]) -> None:
        super().__init__()
        self.frames: list[Frame] = []
        self._base = f"{base}/"
        self._changed = changed
        self._places: dict[str, int] = {}
        """Place in `frames` of the last compilation that torch gave a number."""

    def emit(self, record: logging.LogRecord) -> None:
        metadata: dict[str, Any] = getattr(record, "metadata", {})
        if "frame_id" not in metadata:
            return  # of no frame: a note on the process
        payload = getattr(record, "payload", None) or ""
        number = f"{metadata['frame_id']}/{metadata.get('frame_compile_id', 0)}"
        if "dynamo_start" in metadata:
            self._begin(number, metadata["dynamo_start"], metadata.get("attempt", 0))
        elif number not in self._places:
            return
        elif "dynamo_output_graph" in metadata:
            self._change(number, graph=graph_lines(payload))
        elif "artifact" in metadata:
            self._read_artifact(number, metadata["artifact"].get("name", ""), payload)
        elif "compilation_metrics" in metadata:
            self._read_metrics(number, metadata["compilation_metrics"])
        elif "bwd_compilation_metrics" in metadata:
            taken = metadata["bwd_compilation_metrics"].get("duration_us") or 0
            self._end(number, seconds=self._frame(number).seconds + taken / 1e6)

    def _frame(self, number: str) -> Frame:
        return self.frames[self._places[number]]

    def _change(self, number: str, **changes: Any) -> None:
        self.frames[self._places[number]] = replace(self._frame(number), **changes)

    def _end(self, number: str, **changes: Any) -> None:
        self._change(number, **changes)
        self._changed(self._places[number], self._frame(number))

    def _begin(self, number: str, start: dict[str, Any], attempt: int) -> None:
        if attempt == 0:  # later ones are of a frame that was begun
            name = (start.get("stack") or [{}])[-1].get("name", "?")
            self._places[number] = len(self.frames)
            self.frames.append(Frame(name, "?", number))

    def _read_artifact(self, number: str, name: str, payload: str) -> None:
        kind, _, state = name.rpartition("_")
        frame = self._frame(number)
        if name == "dynamo_graph_break_reason":
            found = self._graph_break(payload)
            if found not in frame.breaks:
                self._change(number, breaks=(*frame.breaks, found))
        elif kind in _CACHES and state in ("hit", "miss", "bypass"):
            self._change(number, caches=(*frame.caches, f"{_CACHES[kind]}: {state}"))

    def _read_metrics(self, number: str, metrics: dict[str, Any]) -> None:
        _, _, reason = (metrics.get("recompile_reason") or "").strip().partition(": ")
        self._end(
            number,
            function=metrics.get("co_name") or "?",
            line=self._place(metrics.get("co_filename") or "?", metrics.get("co_firstlineno") or 0),
            ops=metrics.get("graph_op_count") or 0,
            recompiled=without_addresses(reason.splitlines()[0].partition("  # ")[0].strip())
            if reason
            else "",
            failed=in_one_line(metrics["fail_reason"]) if metrics.get("fail_reason") else "",
            seconds=(metrics.get("duration_us") or 0) / 1e6,
        )

    def _graph_break(self, text: str) -> GraphBreak:
        """Read a break from torch's text: its place, the reason, and two tracebacks."""
        head, _, _ = text.partition("Traceback (most recent call last)")
        reason, _, stack = head.partition("User code traceback:")
        at = _BREAK_AT.search(reason)
        own = [(file, int(line)) for file, line in _IN_STACK.findall(stack or head) if not is_installed(file)]
        line = self._place(*own[-1]) if own else at[1] if at else "a line that torch does not name"
        why = reason.partition("Graph Break Reason:")[2] or reason.partition("\n")[0]
        return GraphBreak(line, in_one_line(why))

    def _place(self, file: str, line: int) -> str:
        return f"{file.removeprefix(self._base)}:{line}"
