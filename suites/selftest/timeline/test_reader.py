"""Unit tests of the reader of flight records: how it numbers calls, where bars end, who did not come."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.timeline import FEATURE
from lockstep.features.timeline.reader import read_timeline
from lockstep.features.timeline.timeline import WORLD, Bar, Span, Timeline
from lockstep.flight_entries import DEFAULT_GROUP, FlightRecord
from lockstep.protocol import Finished, RankStatus
from lockstep.world.diagnosis import Diagnosis
from lockstep.world.outcome import Died, Fate, ItemOutcome, RankOutcome, Stuck


def call(number: int, at: int, **fields: Any) -> dict[str, Any]:
    """Return an entry for a collective of the default group, that is over."""
    return {
        "process_group": ("0", "default_pg"),
        "profiling_name": "gloo:barrier",
        "pg_id": 0,
        "collective_seq_id": number,
        "p2p_seq_id": number,
        "is_p2p": False,
        "time_created_ns": at,
        "retired": True,
        **fields,
    }


def record(*entries: dict[str, Any], **fields: Any) -> FlightRecord:
    given = {"groups": {}, "before": {}, "began": 0, "taken": 10_000_000, **fields}
    return FlightRecord(entries, **given)


def rank(number: int, fate: Fate | None = None, *reports: dict[str, Any], **fields: Any) -> RankOutcome:
    return RankOutcome(number, list(reports), fate=fate, **fields)


def outcome(
    *ranks: RankOutcome, diagnosis: Diagnosis | None = None, **records: FlightRecord | None
) -> ItemOutcome:
    """Return an outcome with the record of rank 0 as `r0`, and so on."""
    parts = {FEATURE: {int(name[1:]): each for name, each in records.items()}}
    return ItemOutcome(ranks, 60, False, 1, diagnosis, parts=parts)


def read(outcome: ItemOutcome, until: int | None = None) -> Timeline:
    timeline = read_timeline("id", outcome, "/base", until, "why")
    assert timeline is not None
    return timeline


def brief(bars: tuple[Bar, ...]) -> list[tuple[int, str, int, int]]:
    return [(bar.key[2], bar.state, bar.begun, bar.end) for bar in bars]


def stuck(state: Any = "runs", of: FlightRecord | None = None, **fields: Any) -> Stuck:
    return Stuck(RankStatus("", "f() at a.py:1", state=state, record=of, **fields), 0.0)


def test_a_test_without_calls_has_no_timeline() -> None:
    assert read_timeline("id", outcome(rank(0)), "") is None
    assert read_timeline("id", outcome(rank(0), rank(1), r0=record(), r1=None), "") is None
    assert read_timeline("id", outcome(rank(0), r0=record(call(1, 50))), "", until=50) is None


def test_a_record_is_of_the_end_of_the_test_or_of_the_rank() -> None:
    waiting = stuck(of=record(call(1, 6, retired=False)))
    timeline = read(outcome(rank(0), rank(1, waiting), rank(2), r0=record(call(1, 5))))
    assert (timeline.nodeid, timeline.sentence) == ("id", "why")
    assert [lane.is_known for lane in timeline.lanes] == [True, True, False]
    assert [[bar.begun for bar in lane.bars] for lane in timeline.lanes[:2]] == [[5], [6]]


def test_a_record_that_a_rank_has_sent_at_the_end_goes_before_others() -> None:
    finished = Finished(True, 0, 0, parts={FEATURE: record(call(1, 7))})
    timeline = read(outcome(rank(0, finished), rank(1), r0=record(call(1, 5)), r1=record(call(1, 6))))
    assert [[bar.begun for bar in lane.bars] for lane in timeline.lanes] == [[7], [6]]


def test_a_collective_ends_no_sooner_than_its_last_rank_began() -> None:
    ended = call(2, 200, time_discovered_completed_ns=250)
    late = call(3, 300, time_discovered_completed_ns=10**9)
    first = record(call(1, 100), ended, late, call(4, 400))
    timeline = read(outcome(rank(0), rank(1), r0=first, r1=record(call(1, 150), call(2, 220), call(3, 310))))
    assert brief(timeline.lanes[0].bars) == [
        (1, "over", 100, 150),
        (2, "over", 200, 250),
        (3, "over", 300, 10_000_000),
        (4, "failed", 400, 10_000_000),
    ]
    assert [bar.has_end for bar in timeline.lanes[0].bars] == [False, True, True, False]
    assert [lane.missing for lane in timeline.lanes] == [(), ((DEFAULT_GROUP, 0, 4),)]
    assert (timeline.begun, timeline.end) == (0, 10_000_000)


def test_a_picture_begins_at_most_a_millisecond_before_the_first_call() -> None:
    def begun(at: int, **fields: Any) -> int:
        calls = record(call(1, at), call(2, 9_000_000), **fields)
        return read(outcome(rank(0), rank(1), r0=calls, r1=record(began=7))).begun

    assert begun(5_000_000, began=9) == 4_000_000
    assert begun(5_000_000, began=4_500_000, taken=10**8) == 4_000_000
    assert begun(900_000, began=3) == 3


def test_a_send_ends_where_it_began_and_waits_for_no_member() -> None:
    send = {"is_p2p": True, "peer": 1, "profiling_name": "gloo:send", "p2p_seq_id": 4}
    entries = call(9, 100, **send), call(9, 200, retired=False, **send)
    timeline = read(outcome(rank(0), rank(1), r0=record(*entries), r1=record(call(1, 50))))
    over, waits = timeline.lanes[0].bars
    assert (over.name, over.peer, over.key[2], over.end) == ("send", 1, 4, 100)
    assert (waits.state, waits.end) == ("waits", 10_000_000)
    assert timeline.lanes[1].missing == ()


def test_a_bar_says_what_its_entry_says() -> None:
    frames = [
        {"name": "f", "filename": "/base/a.py", "line": 3},
        {"name": "g", "filename": "/other/b.py", "line": 4},
    ]
    entry = call(
        1,
        5,
        input_dtypes=["Float", "Half"],
        input_sizes=[[2, 3], [4]],
        frames=frames,
        phase="backward",
        peer=5,
    )
    (bar,) = read(outcome(rank(0), r0=record(entry))).lanes[0].bars
    assert bar.lines == ("f() at a.py:3", "g() at /other/b.py:4")
    assert (bar.tensors, bar.num_bytes) == ("float [2, 3], half [4]", 32)
    assert (bar.op, bar.phase, bar.peer) == ("barrier", "backward", None)
    (bare,) = read(outcome(rank(0), r0=record(call(1, 5, frames=None)))).lanes[0].bars
    assert (bare.lines, bare.tensors, bare.num_bytes, bare.phase) == ((), "", 0, "")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *dict.fromkeys(["ComplexDouble"], 16).items(),
        *dict.fromkeys(["Double", "Long", "ComplexFloat", "float64", "int64", "uint64"], 8).items(),
        *dict.fromkeys(["Float", "Int", "float32", "int32", "uint32", "ComplexHalf"], 4).items(),
        *dict.fromkeys(["Half", "BFloat16", "Short", "float16", "int16", "uint16"], 2).items(),
        *dict.fromkeys(["Char", "Byte", "Bool", "int8", "uint8", "Float8_e4m3fn"], 1).items(),
        ("QInt32", None),
    ],
)
def test_a_dtype_has_its_size(dtype: str, size: int | None) -> None:
    entry = call(1, 5, input_dtypes=["Byte", dtype], input_sizes=[[0], [3, 2]])
    (bar,) = read(outcome(rank(0), r0=record(entry))).lanes[0].bars
    assert bar.num_bytes == (None if size is None else 6 * size)


def test_calls_are_counted_from_the_beginning_of_the_test() -> None:
    other = {"process_group": ("7", "own"), "pg_id": 3}
    first = record(call(11, 10), call(4, 20, **other), before={DEFAULT_GROUP: 10, "7": 3})
    second = record(call(11, 11), call(12, 12))
    timeline = read(outcome(rank(0), rank(1), r0=first, r1=second))
    assert [[bar.key for bar in lane.bars] for lane in timeline.lanes] == [
        [(DEFAULT_GROUP, 0, 1), ("7", 0, 1)],
        [(DEFAULT_GROUP, 0, 1), (DEFAULT_GROUP, 0, 2)],
    ]


def test_calls_that_a_record_has_lost_are_counted_too() -> None:
    (lane,) = read(outcome(rank(0), r0=record(call(13, 10), before={DEFAULT_GROUP: 10}))).lanes
    assert [bar.key[2] for bar in lane.bars] == [3]
    failed = record(call(1, 10, failed=True), call(2, 20))
    assert [bar.state for bar in read(outcome(rank(0), r0=failed)).lanes[0].bars] == ["failed", "over"]


def test_groups_of_one_name_and_other_ranks_are_kept_apart() -> None:
    group = {"process_group": ("7", "own"), "pg_id": 3}
    first = record(call(3, 10, **group), groups={"7": (0, 1), "8": (0, 1, 2)}, before={"7": 2})
    last = record(call(1, 20, retired=False, **group), groups={"7": (2, 3), "8": (0, 1, 2)})
    timeline = read(outcome(*map(rank, range(4)), r0=first, r2=last, r3=record(groups={"7": (2, 3)})))
    assert [bar.key for lane in timeline.lanes for bar in lane.bars] == [
        ("7 of ranks 0, 1", 0, 1),
        ("7 of ranks 0, 1", 0, 1),
        ("7 of ranks 2, 3", 0, 1),
    ]
    assert timeline.groups == {
        ("7 of ranks 0, 1", 0): (0, 1),
        ("7 of ranks 2, 3", 0): (2, 3),
        ("8", 0): (0, 1, 2),
    }
    assert [lane.rank for lane in timeline.lanes if lane.missing] == [3]


def test_a_group_that_took_over_a_name_is_another() -> None:
    repaired = [call(5, 10, pg_id=1), call(6, 20, pg_id=1), call(2, 30, pg_id=2), call(3, 40, pg_id=2)]
    timeline = read(outcome(rank(0), r0=record(*repaired, before={DEFAULT_GROUP: 1})))
    assert [bar.key[1:] for bar in timeline.lanes[0].bars] == [(1, 1), (1, 2), (0, 1), (0, 2)]


def test_calls_before_a_rank_joined_its_last_world_are_of_that_before() -> None:
    joins = (5, (0, 1, 2)), (100, (0, 1))
    both = record(call(1, 10), call(1, 150, pg_id=1), joins=joins, groups={"7": (0, 1)})
    gone = record(call(1, 12, retired=False), joins=joins[:1], groups={"9": (1, 2)})
    timeline = read(outcome(*map(rank, range(3)), r0=both, r1=both, r2=gone))
    assert [[bar.key[1] for bar in lane.bars] for lane in timeline.lanes] == [[WORLD, 0], [WORLD, 0], [WORLD]]
    assert [bar.worlds_ago for bar in timeline.lanes[0].bars] == [1, 0]
    assert timeline.groups == {("7", 0): (0, 1), (DEFAULT_GROUP, WORLD): (0, 1, 2)}
    assert timeline.lanes[2].missing == ((DEFAULT_GROUP, 0, 1),)


def test_a_collective_begun_as_different_ones_is_a_mismatch() -> None:
    other = call(2, 20, profiling_name="gloo:broadcast")
    both = outcome(rank(0), rank(1), r0=record(call(1, 10), call(2, 20)), r1=record(call(1, 10), other))
    assert [bar.is_mismatch for bar in read(both).lanes[0].bars] == [False, True]
    alike = replace(both, parts={FEATURE: {n: record(call(1, 10), call(2, 20)) for n in (0, 1)}})
    for number, found in ((1, [True, False]), (2, [False, True]), (3, [False, False])):
        named = SimpleNamespace(mismatch=SimpleNamespace(group=DEFAULT_GROUP, number=number), blame=())
        diagnosed = replace(alike, diagnosis=named)  # type: ignore[arg-type]
        assert [bar.is_mismatch for bar in read(diagnosed).lanes[0].bars] == found
    named.mismatch.group, named.mismatch.number = "7", 1
    assert [bar.is_mismatch for bar in read(diagnosed).lanes[0].bars] == [False, False]
    named.mismatch = None
    assert [bar.is_mismatch for bar in read(diagnosed).lanes[0].bars] == [False, False]


def test_what_a_rank_lost_with_a_connection_failed_then() -> None:
    broken = {
        "outcome": "failed",
        "stop": 25e-9,
        "longrepr": "gloo: Connection closed by peer",
        "when": "call",
    }
    reports = {"start": 0.0, "$report_type": "TestReport", **broken}
    entries = record(call(1, 10), call(2, 20), call(3, 30))
    lost = read(outcome(rank(0, None, reports), rank(1), r0=entries, r1=entries))
    assert brief(lost.lanes[0].bars) == [(1, "over", 10, 10), (2, "failed", 20, 25), (3, "over", 30, 30)]
    assert lost.lanes[0].fate == "failed"
    just = read(outcome(rank(0, lost_others=[2e-8]), rank(1), r0=entries, r1=entries))
    assert [bar.state for bar in just.lanes[0].bars] == ["over", "failed", "over"]
    others = read(outcome(rank(0, lost_others=[15e-9]), rank(1), r0=entries, r1=entries))
    assert [bar.state for bar in others.lanes[0].bars] == ["failed", "over", "over"]
    for harmless in ({"outcome": "passed"}, {"longrepr": "assert 0"}, {"stop": 5e-9}):
        kept = read(outcome(rank(0, None, {**reports, **harmless}), r0=entries))
        assert [bar.state for bar in kept.lanes[0].bars] == ["over"] * 3


def test_the_last_call_that_failed_lasts_to_the_end_of_the_picture() -> None:
    entries = record(call(1, 10), call(2, 20, failed=True))
    (lane,) = read(outcome(rank(0, lost_others=[25e-9]), r0=entries)).lanes
    assert brief(lane.bars) == [(1, "over", 10, 10), (2, "failed", 20, 10_000_000)]


def test_a_dead_rank_has_what_others_show_of_it() -> None:
    frames = [{"name": name, "filename": f"/base/{name}.py", "line": 1} for name in "fgh"]
    waits = call(2, 30, retired=False, frames=frames, phase="forward")
    alive = record(call(1, 10), waits)
    died = Died(-9, "", 40e-9)
    timeline = read(outcome(rank(0), rank(1, died), r0=alive))
    first, dead = timeline.lanes
    assert brief(dead.bars) == [(1, "inferred", 10, 10)]
    assert not dead.bars[0].has_end
    assert (dead.fate, dead.died_at, dead.is_known, dead.is_blamed) == ("died: SIGKILL", 40, False, True)
    assert dead.place == "between barrier #1 and barrier #2, in forward: f() at f.py:1, from g() at g.py:1"
    assert dead.missing == ((DEFAULT_GROUP, 0, 2),)
    assert (first.died_at, first.is_blamed, first.missing) == (None, False, ())
    bare = read(outcome(rank(0), rank(1, died), r0=record(call(1, 10, retired=False))))
    assert bare.lanes[1].place == "before barrier #1"
    assert read(outcome(rank(0), rank(1, died), r0=record(call(1, 10)))).lanes[1].place == "after barrier #1"
    alone = record(call(1, 10, process_group=("7", "own")), groups={"7": (0,)})
    assert read(outcome(rank(0), rank(1, died), r0=alone)).lanes[1].place == ""
    stack = 'Current thread 0x01 (most recent call first):\n  File "/base/a.py", line 3 in f\n'
    crash = f"Fatal Python error: Aborted\n\n{stack}"
    assert read(outcome(rank(0), rank(1, Died(-6, crash, 0)), r0=alive)).lanes[1].place == "a.py:3 in f"


def test_a_death_after_the_last_record_ends_the_picture() -> None:
    timeline = read(outcome(rank(0), rank(1, Died(-9, "", 2.0)), r0=record(call(1, 10, retired=False))))
    assert timeline.end == timeline.lanes[0].bars[0].end == 2 * 10**9


@pytest.mark.parametrize(
    ("state", "retired", "fate", "place"),
    [
        ("runs", False, "waits", "save() at f() at a.py:1 [case]"),
        ("runs", True, "was ended by the harness", "save() at f() at a.py:1 [case]"),
        ("votes", False, "was ended by the harness", "the wait for other ranks after [case]"),
        ("idle", False, "ended the test", ""),
    ],
)
def test_a_rank_that_was_ended_says_where(state: str, retired: bool, fate: str, place: str) -> None:
    status = stuck(state, record(call(1, 5), call(2, 10, retired=retired)), call="save()", case="case")
    ended = outcome(rank(0, status), rank(1), r1=record(call(1, 10)))
    (lane, other) = read(ended).lanes
    assert (lane.fate, lane.place, other.fate) == (fate, place, "passed")
    part = read(ended, until=100).lanes[0]
    assert part.fate == ("was ended by the harness" if state == "idle" else fate)


def test_a_diagnosis_blames_its_ranks() -> None:
    blamed = SimpleNamespace(mismatch=None, blame=(1,))
    both = outcome(rank(0), rank(1), r0=record(call(1, 10)), r1=record(call(1, 10)))
    lanes = read(replace(both, diagnosis=blamed)).lanes  # type: ignore[arg-type]
    assert [lane.is_blamed for lane in lanes] == [False, True]


def test_phases_and_subtests_are_spans_with_what_stacks_show() -> None:
    phase = {"$report_type": "TestReport", "when": "setup", "start": 1.0, "stop": 2.0, "outcome": "passed"}
    case = {**phase, "$report_type": "SubtestReport", "when": "call"}
    named = {**case, "context": {"msg": "b"}}
    entries = [call(n, 10 * n, phase=phase) for n, phase in enumerate(["f", "f", "", "g", "f"], 1)]
    lanes = read(
        outcome(
            rank(0, None, phase, {**case, "_subtest.context": {"msg": "a"}}, named, case),
            r0=record(*entries[:1], {**entries[1], "time_discovered_completed_ns": 15}, *entries[2:]),
        )
    ).lanes
    at = 10**9, 2 * 10**9
    assert lanes[0].spans == (
        Span("setup", *at),
        Span("[a]", *at),
        Span("[b]", *at),
        Span("[subtest]", *at),
        Span("f", 10, 15, is_measured=False),
        Span("g", 40, 40, is_measured=False),
        Span("f", 50, 50, is_measured=False),
    )


def test_a_subtest_ends_where_others_follow() -> None:
    joins = (0, (0, 1)), (45, (0,)), (50, (0,))
    entries = record(call(1, 10), call(2, 20, retired=False), call(3, 50), call(4, 70), joins=joins)
    timeline = read(outcome(rank(0), rank(1), r0=entries, r1=record(joins=joins, taken=40)), until=50)
    assert timeline.end == 50
    assert brief(timeline.lanes[0].bars)[-1] == (2, "waits", 20, 50)
    assert [bar.worlds_ago for bar in timeline.lanes[0].bars] == [1, 1]
