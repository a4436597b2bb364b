"""Reports of ranks whose process ends, stops or runs out of memory in a test."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.fault_session import FaultSession

FAULTS = "deaths"
BACKENDS = ("gloo", "shm")
FRESH = True  # what the program of a warm interpreter has on the stack, a crash would show


@pytest.mark.parametrize(
    ("name", "ranks", "how"),
    [
        ("test_exit_0", "rank 1 of 2", "exited with code 0"),
        ("test_exit_255", "rank 1 of 2", "exited with code 255"),
        ("test_all_ranks_exit", "all 2 ranks", "exited with code 6"),
        ("test_the_first_rank_is_killed", "rank 0 of 2", "died: SIGKILL"),
        ("test_terminated", "rank 1 of 2", "died: SIGTERM"),
        ("test_signal_without_a_name", "rank 1 of 2", "died: signal 40"),
        ("test_bad_pointer", "rank 1 of 2", "died: SIGSEGV"),
        ("test_abort", "rank 1 of 2", "died: SIGABRT"),
        ("test_native_stack_overflow", "rank 1 of 2", "died: SIGSEGV"),
        ("test_every_file_descriptor_is_closed", "rank 1 of 2", ""),
        ("test_a_thread_ends_the_rank_while_the_other_waits", "rank 1 of 2", "exited with code 9"),
    ],
)
def test_a_death_names_the_rank_and_how_it_ended(
    session: FaultSession, name: str, ranks: str, how: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith(f"{ranks} {how}")
    first = "[01]" if ranks == "all 2 ranks" else ranks.split()[1]  # of equal deaths the first one is named
    assert re.match(rf"rank {first}: {re.escape(how)}", verdict.message)
    assert f"pytest test_faults.py::{name}" in verdict.text  # the line that runs it again
    assert verdict.seconds < 15  # the deadline is 30


@pytest.mark.parametrize("name", ["test_set_up", "test_tear_down"])
def test_a_death_is_reported_in_its_phase(session: FaultSession, name: str) -> None:
    assert session[name].outcomes == ["error"]
    assert session[name].head()[0] == "rank 1 of 2 died: SIGKILL"
    phase = name.removeprefix("test_").replace("_", "")
    assert session[name].message == f'failed on {phase} with "rank 1: died: SIGKILL"'


def test_a_rank_that_waits_for_a_dead_one_is_its_victim(session: FaultSession) -> None:
    place = session.place("# of rank 1")
    assert (
        session["test_the_first_rank_is_killed"]
        .head()[1]
        .startswith(f"rank 1: lost its connection to rank 0 at {place}")
    )


@pytest.mark.parametrize("name", ["test_bad_pointer", "test_abort", "test_native_stack_overflow"])
def test_a_crash_shows_its_python_line(session: FaultSession, name: str) -> None:
    code = {"test_bad_pointer": "string_at(0)", "test_abort": "os.abort()"}.get(name, "regcomp(")
    number = session.place(code).split(":")[1]
    assert f'test_faults.py", line {number} in {name}' in session[name].text
    assert session[name].head()[0].endswith(f", at test_faults.py:{number} in {name}")
    assert "Fatal Python error: " in session[name].text
    assert "/_pytest/" not in session[name].text


@pytest.mark.parametrize(("kind", "other"), [("dtypes", "double [3]"), ("shapes", "float [100000]")])
def test_other_dtypes_or_shapes_name_a_rank_of_the_collective(
    session: FaultSession, kind: str, other: str
) -> None:
    verdict = session[f"test_other_{kind}"]
    assert verdict.outcomes == ["failure"]
    assert "all_reduce" in verdict.text
    if session.backend == "gloo":  # ends the process
        assert f"in test_other_{kind}" in verdict.text
    else:
        theirs = f"rank 1 was in all_reduce #1 ({other})"
        assert verdict.head()[0] == f"mismatch: rank 0 was in all_reduce #1 (float [3]) while {theirs}"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("test_interrupted", "KeyboardInterrupt"),
        ("test_recursion", "RecursionError: maximum recursion depth exceeded"),
        ("test_python_is_out_of_memory", "MemoryError"),
        ("test_torch_is_out_of_memory", "RuntimeError: "),
        ("test_bad_alloc", "MemoryError: std::bad_alloc"),
    ],
)
def test_an_exception_in_low_memory_is_a_failure_with_its_line(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert verdict.message.startswith(f"rank 1: {what}")
    assert f"in {name}" in verdict.text or f"def {name}" in verdict.text
