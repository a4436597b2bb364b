"""Ranks that die, run out of something, or do not belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suites.selftest.shared_memory import left_in_shared_memory, names_in_shared_memory
from suites.selftest.warm_pytest import run_module

PROGRAMS = Path(__file__).parents[1] / "projects" / "shm"

Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def shared_memory() -> set[str]:
    """The names in /dev/shm before any of it."""
    return names_in_shared_memory()


@pytest.fixture(scope="module")
def found(shared_memory: set[str]) -> Found:
    done = run_module("faults", cwd=PROGRAMS, timeout=240)
    assert done.returncode == 0, done.stderr
    results: Found = json.loads(done.stdout.splitlines()[-1])
    return results


def test_a_killed_rank_is_named_within_moments(found: Found) -> None:
    first, dead, last = found["killed"]
    assert dead is None
    for kind, text, pid, seconds in (first, last):
        assert kind == "PeerLost"
        assert text == f"rank 1 (pid {pid}) of group 0 is gone: barrier (#2) waits for it"
        assert seconds < 2  # 5 ms and more on an idle machine


def test_what_a_dead_rank_has_handed_over_counts(found: Found) -> None:
    assert found["killed_after_its_part"] == [[3.0] * 4, None]


def test_nothing_is_left_in_the_file_system(found: Found, shared_memory: set[str]) -> None:
    assert found["all_killed"] == [None, None]
    assert left_in_shared_memory(shared_memory) == []


def test_a_rank_that_ends_lets_others_read_first(found: Found) -> None:
    assert found["exits_early"] == [float(1 << 20)] * 2


def test_too_few_descriptors_are_an_error_of_all_ranks(found: Found) -> None:
    for kind, text in found["too_few_descriptors"]:
        assert kind == "MeetingFailed"
        assert "rank 1 cannot map the memory of its peers: [Errno 24] Too many open files" in text
        assert "and may be raised to 4096" in text


def test_no_descriptor_at_all_is_an_error_of_all_ranks(found: Found) -> None:
    (kind, text), (own, _) = found["no_descriptor_for_its_own"]
    assert kind == own == "MeetingFailed"
    assert "rank 1 has no shared memory: [Errno 24] Too many open files" in text


def test_no_memory_is_an_error_of_all_ranks_for_this_call(found: Found) -> None:
    (other, reason, *works), (kind, text, *works_here) = found["out_of_memory"]
    assert works == works_here == [[2.0] * 4]
    assert kind == "OutOfSharedMemory"
    assert text.startswith("all_reduce (SUM) of 67108864 float32 (#1) needs 256 MiB of memory")
    assert "`ulimit -v`" in text
    assert other == "OutOfSharedMemory"
    assert "could not take part" in reason
    assert "needs 256 MiB of memory" in reason


def test_no_memory_for_what_a_peer_has_handed_over_names_the_limits(found: Found) -> None:
    (nothing, _, *works), (kind, text, *works_here) = found["no_room_for_a_peers_memory"]
    assert works == works_here == [[2.0] * 4]
    assert (nothing, kind) == ("", "OutOfSharedMemory")
    assert "has posted 67108864 bytes that cannot be mapped: [Errno 12] Cannot allocate memory. Raise" in text


def test_ranks_of_two_versions_are_refused_on_all_ranks(found: Found) -> None:
    expected = "group 0: rank 0 speaks version 1 of the protocol, rank 1 version 2"
    for kind, text in found["another_version"]:
        assert kind == "MeetingFailed"
        assert text == f"{expected}; use one version of lockstep.shm on all ranks"


def test_ranks_of_two_torches_are_refused_on_all_ranks(found: Found) -> None:
    for kind, text in found["another_torch"]:
        assert kind == "MeetingFailed"
        assert text.endswith("rank 1 torch 2.0; use one version on all ranks")


def test_ranks_of_two_hosts_are_refused_on_all_ranks(found: Found) -> None:
    for kind, text in found["another_host"]:
        assert kind == "MeetingFailed"
        assert "backend shm is for ranks of one host: rank 0 is on " in text
        assert text.endswith("rank 1 on elsewhere (boot 1); use gloo between hosts")


def test_a_rank_that_does_not_come_is_named(found: Found) -> None:
    (kind, text), _ = found["one_does_not_come"]
    assert kind == "MeetingFailed"
    assert text == "rank 1 did not come to group 0 within 0.3 s"


def test_a_group_that_ended_holds_nothing(found: Found) -> None:
    for before, after in found["given_back"]:
        assert before == after


def test_a_forked_child_may_not_use_the_group(found: Found) -> None:
    for refused, total in found["forked"]:
        for kind, text in refused:
            assert kind == "ShmError"
            assert "of which this is a fork" in text
        assert total == 3 << 16
