"""Reports of sends and receives that no other rank took up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from suites.selftest.project import copy_project, line_of, run_pytest

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


def test_an_unmatched_send_on_shm_fails_in_a_world_of_gloo(tmp_path: Path) -> None:
    run = run_pytest(copy_project("shm_in_gloo", tmp_path), "test_gloo.py")
    (failure,) = (child for child in run.case("test_unmatched") if child.tag == "failure")
    place = f"test_gloo.py:{line_of('isend', run.path / 'test_gloo.py')}"
    sentence = f"left isend to rank 1 (float32 [2]) at {place} in flight: it was not received"
    assert sentence in (failure.text or "")
