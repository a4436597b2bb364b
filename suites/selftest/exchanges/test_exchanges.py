"""Reports of sends and receives that no other rank took up."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.exchanges.plugin import (
    ANY_RANK,
    FEATURE,
    Exchanged,
    Exchanging,
    pytest_ranks_waits,
)
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import Finished, RankStatus
from lockstep.world.clock import Clock
from lockstep.world.outcome import RankOutcome
from suites.selftest.project import WITHOUT_PLUGINS, copy_project, line_of, run_pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "exchanges"
BACKENDS = ("gloo", "shm")


def test_ranks_may_send_unequally_often(session: FaultSession) -> None:
    assert session["test_unequal_sends"].outcomes == ["passed"]


def test_a_send_without_a_receive_fails_the_test(session: FaultSession) -> None:
    head = session["test_send_without_a_receive"].head()
    place = session.place("dist.isend(torch.ones(3), 1 - world.rank)")
    for rank in (0, 1):
        what = f"left isend to rank {1 - rank} (float32 [3]) at {place} in flight: it was not received"
        assert what in head[rank]


def test_a_receive_without_a_send_fails_the_test(session: FaultSession) -> None:
    (line,) = session["test_receive_without_a_send"].head()[:1]
    place = session.place("dist.irecv(torch.ones(2, 2), 0, tag=7)")
    assert (
        line == f"rank 1 of 2 left irecv from rank 0 (float32 [2, 2]) at {place} in flight: it was not sent"
    )


def test_a_send_that_was_waited_for_needs_no_receive_that_is_seen(session: FaultSession) -> None:
    assert session["test_a_receive_that_no_wrapper_sees"].outcomes == ["passed"]


def test_a_send_too_many_fails_the_test(session: FaultSession) -> None:
    head = session["test_sends_that_outnumber_receives"].head()
    place = session.place("handles = [dist.isend")
    what = f"left isend to rank 1 (float32 [1]) at {place} in flight: it was not received"
    assert head[:2] == [f"rank 0 of 2 {what}", "rank 1: passed"]
    assert session["test_messages_without_a_wait"].outcomes == ["passed"]


def test_ranks_that_all_receive_first_are_a_deadlock(session: FaultSession) -> None:
    place = session.place("dist.recv(received, 1 - world.rank)")
    waits = [
        f"rank {rank} waits to receive float32 [3] from rank {1 - rank} (recv at {place})" for rank in (0, 1)
    ]
    assert session["test_ranks_that_all_receive_first"].head()[0] == f"deadlock: {'; '.join(waits)}"


def test_a_wait_for_more_than_a_rank_has_sent_before_its_end_is_for_nothing(session: FaultSession) -> None:
    place = session.place("dist.P2POp(dist.irecv, torch.ones(2), 1)")
    assert session["test_one_receive_too_many"].head()[0] == (
        f"rank 0 waits to receive float32 [2] from rank 1 (batch_isend_irecv at {place}), "
        "and rank 1 has ended the test"
    )


@pytest.mark.parametrize("name", ["a_receive_that_times_out", "a_wait_that_times_out"])
def test_a_receive_that_times_out_by_itself_is_left_to_the_test(session: FaultSession, name: str) -> None:
    assert session[f"test_{name}"].outcomes == ["passed"]


@pytest.mark.parametrize("name", ["a_late_message", "a_message_of_a_timer", "an_alarm_of_the_test"])
def test_a_message_may_be_late(session: FaultSession, name: str) -> None:
    assert session[f"test_{name}"].outcomes == ["passed"]


def test_peers_are_named_by_their_ranks_in_the_world(session: FaultSession) -> None:
    place = session.place("dist.recv(torch.ones(4)")
    group = r"with tag 2 in group \S+"
    waits = [
        rf"rank {rank} waits to receive float32 \[4\] from rank {1 - rank} {group} \(recv at {place}\)"
        for rank in (0, 1)
    ]
    assert re.fullmatch(f"deadlock: {'; '.join(waits)}", session["test_a_group_in_another_order"].head()[0])


def received(begun: int = 1, **changes: Any) -> Exchanged:
    usual = {"group": DEFAULT_GROUP, "is_send": False, "peer": 1, "tag": 0, "waited": 0, "failed": 0}
    return Exchanged(begun=begun, call="recv", tensor="float32 [3]", line="a.py:7", **(usual | changes))


def waits(
    awaited: Exchanged,
    *of_peer: Exchanged,
    timeout: float = 1800,
    blocked: float = 3,
    has_ended: bool = False,
) -> Mapping[int, str] | None:
    """Return what is said of rank 0, which waits, and of rank 1, which has exchanged `of_peer`."""
    mine = Exchanging({awaited.key: awaited.begun}, awaited, timeout)
    statuses = {0: RankStatus("", "", blocked=blocked, parts={FEATURE: mine})}
    peer = RankOutcome(1)
    if has_ended:
        peer.fate = Finished(True, 0, 0, parts={FEATURE: of_peer})
        statuses[1] = RankStatus("", "", state="idle")
    else:
        begun = {each.key: each.begun for each in of_peer}
        statuses[1] = RankStatus("", "", parts={FEATURE: Exchanging(begun, None, 0)} if begun else {})
    run: Any = SimpleNamespace(outcomes=[RankOutcome(0), peer], clock=Clock(60))
    return pytest_ranks_waits(run, statuses)


SENT = {"is_send": True, "peer": 0}
FOR_NOTHING = {0: "to receive float32 [3] from rank 1 (recv at a.py:7)"}


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize(
    ("awaited", "sent", "said"),
    [
        (received(), [], FOR_NOTHING),
        (received(), [received(**SENT)], {}),
        (received(2), [received(**SENT)], FOR_NOTHING),
        (received(), [received(tag=1, **SENT)], FOR_NOTHING),
        (received(), [received(group="other", **SENT)], FOR_NOTHING),
        (received(), [received(peer=0)], FOR_NOTHING),  # which receives, too
        (received(), [received(is_send=True, peer=2)], FOR_NOTHING),
        (received(peer=ANY_RANK), [received(**SENT)], {}),
        (received(peer=ANY_RANK), [], {0: "to receive float32 [3] from any rank (recv at a.py:7)"}),
        (received(is_send=True), [], {0: "to send float32 [3] to rank 1 (recv at a.py:7)"}),
        (received(is_send=True), [received(peer=ANY_RANK)], {}),
        (
            received(tag=2, group="7"),
            [received(**SENT)],
            {0: "to receive float32 [3] from rank 1 with tag 2 in group 7 (recv at a.py:7)"},
        ),
    ],
)
def test_a_wait_is_for_nothing_if_no_rank_has_begun_the_counterpart(
    awaited: Exchanged, sent: list[Exchanged], said: dict[int, str], has_ended: bool
) -> None:
    assert waits(awaited, *sent, has_ended=has_ended) == said


def test_a_wait_that_ends_by_itself_or_has_just_begun_is_not() -> None:
    assert waits(received(), timeout=60) == FOR_NOTHING  # not before the deadline of the test
    assert waits(received(), timeout=59) == {}
    assert waits(received(), blocked=2) == {}


def test_an_unmatched_send_on_shm_fails_in_a_world_of_gloo(tmp_path: Path) -> None:
    run = run_pytest(copy_project("shm_in_gloo", tmp_path), "test_gloo.py", **WITHOUT_PLUGINS)
    (failure,) = (child for child in run.case("test_unmatched") if child.tag == "failure")
    place = f"test_gloo.py:{line_of('isend', run.path / 'test_gloo.py')}"
    sentence = f"left isend to rank 1 (float32 [2]) at {place} in flight: it was not received"
    assert sentence in (failure.text or "")
