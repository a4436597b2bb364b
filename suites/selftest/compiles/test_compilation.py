"""Unit tests of the record of compilations: frames in words, the first difference of ranks, torch's trace."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.compiles.compilation import (
    Frame,
    GraphBreak,
    described,
    distinct_breaks,
    first_difference,
    graph_lines,
    in_one_line,
)
from lockstep.features.compiles.compiles import Compiles, compiler_needed
from lockstep.features.compiles.finding import Finding
from lockstep.features.compiles.finding import described as finding_described
from lockstep.features.compiles.trace import TraceReader

FRAME = Frame("f", "a.py:1", "0/0", 2, ("a", "b"), caches=("FX graph: miss",), seconds=1.25)
BREAK = GraphBreak("a.py:3", "why")


def test_a_frame_is_described_in_one_line() -> None:
    assert str(FRAME) == "f (a.py:1)"
    assert FRAME.words() == "f (a.py:1): 2 operations; FX graph: miss"
    assert replace(FRAME, ops=1, caches=()).words() == "f (a.py:1): 1 operation"
    again = replace(FRAME, graph=(), recompiled="x == 1", failed="no", caches=("one", "two"))
    assert again.words() == "f (a.py:1): no graph; recompiled, as x == 1; one; two; runs uncompiled: no"


def test_lines_of_a_graph_lack_devices_and_sizes_without_a_use() -> None:
    text = (
        'def f(x, s0: "Sym(s0)", s1: "Sym(s1)"):\n\n    y = s1 + 1  \n    x.to("cuda:3", "xpu:12", "cpu:1")\n'
    )
    assert graph_lines(text) == (
        'def f(x, s1: "Sym(s1)"):',
        "    y = s1 + 1",
        '    x.to("cuda", "xpu", "cpu:1")',
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n  one  \n two\n", "one"),
        ("one\n two\n  Explanation: because \n", "one: because"),
        ("Explanation: first\n", "Explanation: first"),
        ("one\n Explanation:\n", "one"),
        ("Encountered graph break when attempting to trace x\n one\n two", "one"),
        ("Encountered graph break when attempting to trace x", "torch gives no reason"),
        ("one <f at 0x7f00> of 123456789 and 12345678", "one <f> of ... and 12345678"),
        ("", "torch gives no reason"),
    ],
)
def test_an_explanation_becomes_one_line(text: str, line: str) -> None:
    assert in_one_line(text) == line


def test_a_break_of_several_frames_counts_once() -> None:
    other = replace(BREAK, line="b.py:1")
    frames = replace(FRAME, breaks=(BREAK, other)), replace(FRAME, breaks=(BREAK,))
    assert distinct_breaks(frames) == (BREAK, other)
    assert str(BREAK) == "graph break at a.py:3: why"


AGAIN = replace(FRAME, recompiled="x == 1")


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (FRAME, FRAME, ""),
        (FRAME, replace(FRAME, seconds=9, number="7/1"), ""),
        (AGAIN, None, "rank 0 compiled f (a.py:1) again, as x == 1; rank 1 compiled nothing"),
        (None, FRAME, "rank 0 compiled nothing; rank 1 compiled f (a.py:1)"),
        (FRAME, replace(FRAME, line="b.py:1"), "rank 0 compiled f (a.py:1); rank 1 compiled f (b.py:1)"),
        (
            FRAME,
            replace(AGAIN, graph=()),
            "f (a.py:1): rank 0 compiled it for the first time; rank 1 compiled it again, as x == 1",
        ),
        (
            FRAME,
            replace(FRAME, breaks=(BREAK, BREAK), graph=()),
            f"f (a.py:1): rank 0 no graph break; rank 1 {BREAK}; {BREAK}",
        ),
        (
            replace(FRAME, graph=("a", " c ")),
            replace(FRAME, failed="no"),
            "f (a.py:1): the graphs differ: rank 0 `c`; rank 1 `b`",
        ),
        (
            replace(FRAME, graph=("a",)),
            FRAME,
            "f (a.py:1): the graphs differ: rank 0 a shorter graph; rank 1 `b`",
        ),
        (
            FRAME,
            replace(FRAME, failed="no", caches=()),
            "f (a.py:1): rank 0 compiled it; rank 1 runs it uncompiled: no",
        ),
        (
            replace(FRAME, caches=("one", "two")),
            replace(FRAME, caches=()),
            "f (a.py:1): rank 0 one, two; rank 1 no cache asked",
        ),
    ],
)
def test_the_first_difference_of_ranks_is_a_sentence(
    first: Frame | None, second: Frame | None, difference: str
) -> None:
    by_rank = {rank: [] if frame is None else [frame] for rank, frame in enumerate((first, second))}
    assert first_difference(by_rank) == (f"compilation 1: {difference}" if difference else "")
    later = first_difference({rank: [FRAME, *frames] for rank, frames in by_rank.items()})
    assert later == (f"compilation 2: {difference}" if difference else "")
    assert first_difference({}) == ""


def test_ranks_that_compiled_the_same_are_named_together() -> None:
    frames = {rank: [FRAME] for rank in range(7)} | {5: []}
    assert first_difference(frames) == (
        "compilation 1: ranks 0, 1, 2, 3 and more compiled f (a.py:1); rank 5 compiled nothing"
    )
    assert first_difference({0: [FRAME], 1: [], 2: [FRAME]}).startswith(
        "compilation 1: ranks 0, 2 compiled f"
    )


def test_a_report_lists_what_ranks_compiled() -> None:
    frame = replace(FRAME, breaks=(BREAK,))
    line = "  f (a.py:1): 2 operations; FX graph: miss"
    assert described({0: [frame], 1: [frame]}).splitlines() == [
        "all ranks: 1 frame, 1.2 s on each",
        line,
        f"  {BREAK}",
    ]
    assert described({0: [FRAME, FRAME]}).splitlines() == ["rank 0: 2 frames, 2.5 s", line, line]
    assert described({0: [FRAME], 1: [], 2: [FRAME]}).splitlines() == [
        "ranks 0, 2: 1 frame, 1.2 s on each",
        line,
        "rank 1: 0 frames, 0.0 s",
    ]
    assert len(described({0: [FRAME] * 60}).splitlines()) == 61
    assert described({0: [FRAME] * 62}).splitlines()[60:] == [line, "  and 2 more"]


# The trace


class Trace:
    """A reader, and what it has announced."""

    def __init__(self) -> None:
        self.changed: list[tuple[int, Frame]] = []
        self.reader = TraceReader("/base", lambda place, frame: self.changed.append((place, frame)))

    def write(
        self, payload: str | None = None, frame: int | None = 3, compile_id: int = 0, **kind: Any
    ) -> Frame:
        """Write a record of a frame; return the last frame."""
        record = logging.LogRecord("torch", 10, "", 1, "", (), None)
        if frame is not None:
            kind |= {"frame_id": frame, "frame_compile_id": compile_id}
        record.metadata, record.payload = kind, payload  # type: ignore[attr-defined]
        self.reader.emit(record)
        return self.reader.frames[-1] if self.reader.frames else FRAME


def begun(name: str = "f") -> Trace:
    trace = Trace()
    trace.write(dynamo_start={"stack": [{"name": "outer"}, {"name": name}]})
    return trace


def test_a_frame_begins_and_ends_with_its_metrics() -> None:
    trace = begun()
    assert trace.reader.frames == [Frame("f", "?", "3/0")]
    trace.write("graph\n", dynamo_output_graph={})
    metrics = {
        "co_name": "g",
        "co_filename": "/base/a.py",
        "co_firstlineno": 7,
        "graph_op_count": 4,
        "recompile_reason": "3/0: x == 1  # at 0x12 <f at 0x7f00>\nmore",
        "fail_reason": "broken\n Explanation: thus",
        "duration_us": 1_500_000,
    }
    frame = trace.write(compilation_metrics=metrics)
    assert frame == Frame("g", "a.py:7", "3/0", 4, ("graph",), (), "x == 1", (), "broken: thus", 1.5)
    assert trace.changed == [(0, frame)]
    later = trace.write(bwd_compilation_metrics={"duration_us": 500_000})
    assert later == replace(frame, seconds=2.0)
    assert trace.write(bwd_compilation_metrics={"duration_us": None}) == later
    assert trace.changed[1:] == [(0, later)] * 2


def test_metrics_may_lack_everything() -> None:
    trace = begun()
    assert trace.write(compilation_metrics={}) == Frame("?", "?:0", "3/0")
    trace.write(compilation_metrics={"recompile_reason": "3/0: "})
    assert trace.reader.frames[0].recompiled == ""


def test_records_of_no_frame_of_the_test_are_left_out() -> None:
    trace = Trace()
    trace.write(frame=None, dynamo_start={})
    trace.write(dynamo_output_graph={})
    trace.reader.emit(logging.LogRecord("torch", 10, "", 1, "", (), None))
    assert trace.reader.frames == []
    assert trace.write(dynamo_start={}) == Frame("?", "?", "3/0")
    trace.write(dynamo_start={}, attempt=1)
    assert len(trace.reader.frames) == 1
    trace.write(dynamo_start={}, compile_id=1)
    assert [frame.number for frame in trace.reader.frames] == ["3/0", "3/1"]
    trace.write("first", dynamo_output_graph={})
    assert [frame.graph for frame in trace.reader.frames] == [("first",), ()]


def test_artifacts_say_what_caches_had() -> None:
    trace = begun()
    for name in (
        "fx_graph_cache_miss",
        "aotautograd_cache_hit",
        "fx_graph_cache_bypass",
        "fx_graph_cache_hash",
    ):
        trace.write("", artifact={"name": name})
    trace.write("", artifact={"name": "other_cache_hit"})
    frame = trace.write("", artifact={})
    assert frame.caches == ("FX graph: miss", "AOT autograd: hit", "FX graph: bypass")


USER = '  File "/base/a.py", line 4, in f\n    x()\n  File "/base/b.py", line 5, in g\n'
TORCH = f'  File "{logging.__file__}", line 6, in h\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"Graph break: no\nUser code traceback:\n{USER}{TORCH}", GraphBreak("b.py:5", "Graph break: no")),
        (f"no\n{USER}", GraphBreak("b.py:5", "no")),
        (
            f"no\nTraceback (most recent call last)\n{USER}",
            GraphBreak("a line that torch does not name", "no"),
        ),
        (
            "Graph break in user code at /base/c.py:8\nGraph Break Reason: no",
            GraphBreak("/base/c.py:8", "no"),
        ),
        (
            f"Graph break in user code at /base/c.py:8\nUser code traceback:\n{TORCH}",
            GraphBreak("/base/c.py:8", "Graph break in user code at /base/c.py:8"),
        ),
    ],
)
def test_a_break_is_placed_at_the_users_innermost_line(text: str, found: GraphBreak) -> None:
    trace = begun()
    for _ in range(2):
        frame = trace.write(text, artifact={"name": "dynamo_graph_break_reason"})
    assert frame.breaks == (found,)


# The fixture


def of(*frames: Frame, votes: Any = None) -> Compiles:
    rank: Any = SimpleNamespace(agree=lambda vote: [vote, *votes(vote)])
    reader: Any = SimpleNamespace(frames=[*frames])
    return Compiles(rank, 1, reader)


def test_compilations_are_counted_by_kind() -> None:
    hit = replace(AGAIN, graph=(), caches=("FX graph: hit", "AOT autograd: miss"), breaks=(BREAK,))
    found = of(FRAME, hit)
    assert (found.frames, found.graphs, found.breaks) == ((FRAME, hit), (FRAME,), (BREAK,))
    assert (found.recompilations, found.cache_hits, found.cache_misses) == ((hit,), 1, 2)
    assert found.seconds == 2.5


def test_a_recompilation_fails_with_its_guard() -> None:
    of(FRAME).assert_none_recompiled()
    with pytest.raises(AssertionError) as failed:
        of(FRAME, AGAIN).assert_none_recompiled()
    assert str(failed.value) == "rank 1 has compiled again:\n  f (a.py:1): x == 1"


def test_what_is_compiled_inside_of_a_block_is_listed() -> None:
    frames = [FRAME]
    reader: Any = SimpleNamespace(frames=frames)
    rank: Any = None
    found = Compiles(rank, 1, reader)
    with found.assert_nothing_compiled():
        pass
    with pytest.raises(AssertionError) as failed, found.assert_nothing_compiled():
        frames.append(replace(AGAIN, caches=()))
    line = "  f (a.py:1): 2 operations; recompiled, as x == 1"
    assert str(failed.value) == f"rank 1 has compiled what should have been compiled before:\n{line}"


def test_a_compiler_is_required_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    with pytest.raises(pytest.skip.Exception, match="there is no /no/compiler: apt-get install g"):
        of().require_compiler()
    monkeypatch.setenv("CXX", "sh")
    of().require_compiler()
    monkeypatch.delenv("CXX")
    assert "there is no g++: " in compiler_needed()


def test_ranks_compare_graphs_unless_one_may_differ_or_failed() -> None:
    def others(**changes: Any) -> Any:
        return lambda vote: [replace(vote, **changes)]

    of(FRAME, votes=others()).compare_ranks()
    with pytest.raises(AssertionError) as failed:
        of(FRAME, votes=others(more=(FRAME, AGAIN))).compare_ranks()
    assert str(failed.value) == (
        "ranks disagree on what they compiled: compilation 2: rank 0 compiled nothing; "
        "rank 1 compiled f (a.py:1) again, as x == 1\n"
        "If that is right, say why in the test: compiles.ranks_may_differ(...)"
    )
    for excuse in ({"case": "other"}, {"outcome": "failed"}):
        of(FRAME, votes=others(more=(), **excuse)).compare_ranks()
    of(FRAME, votes=others(more=None)).compare_ranks()
    differs = of(FRAME, votes=others(more=()))
    differs.ranks_may_differ("stages")
    differs.compare_ranks()
    with pytest.raises(ValueError, match=r"^compiles.ranks_may_differ: write why ranks compile different"):
        differs.ranks_may_differ(" ")


# Findings


def test_a_finding_of_several_ranks_is_that_of_the_first_call() -> None:
    late, early = Finding(3, "x", "a", ("late",)), Finding(2, "y", "", ("one", "two"), "why")
    assert finding_described({0: late, 1: early, 2: replace(early, lines=())}).splitlines() == [
        "x, y; in which module is not known: why",
        "  on rank 1, 2, at call 2 of a compiled graph (values of rank 1):",
        "    one",
        "    two",
    ]
    assert finding_described({0: late}).splitlines()[:2] == [
        "x, in module `a`",
        "  on rank 0, at call 3 of a compiled graph:",
    ]
    assert "  on all ranks, at call 3 of a compiled graph (values of rank 0):" in finding_described(
        {0: late, 1: late}
    )


def test_small_differences_show_the_first_bits() -> None:
    text = finding_described({0: Finding(), 1: Finding(backend="x", lines=("bits",))})
    assert text.startswith(
        "x; in which module is not known: each graph alone computes what dynamo has traced"
    )
    assert text.endswith(" say\n  bits")
