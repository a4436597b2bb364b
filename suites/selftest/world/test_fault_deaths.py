"""A rank's process ends, stops or is out of memory in the middle of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

FAULTS = """
import ctypes, os, resource, signal, sys, threading, time
import pytest
if "RANK" in os.environ:
    import torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2)

@pytest.fixture
def dies_in_setup(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_set_up(world, dies_in_setup):
    dist.barrier()

@pytest.fixture
def dies_in_teardown(world):
    yield
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_tear_down(world, dies_in_teardown):
    pass

def test_exit_0(world):
    if world.rank == 1:
        os._exit(0)
    dist.barrier()

def test_exit_1(world):
    if world.rank == 1:
        os._exit(1)

def test_all_ranks_exit(world):
    os._exit(6)

def test_the_first_rank_is_killed(world):
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # of rank 1

def test_terminated(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)

def test_signal_without_a_name(world):
    if world.rank == 1:
        os.kill(os.getpid(), 40)
        time.sleep(100)

def test_interrupted(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(100)

def test_bad_pointer(world):
    threading.Thread(target=lambda: time.sleep(100), daemon=True).start()
    if world.rank == 1:
        ctypes.string_at(0)

def test_abort(world):
    if world.rank == 1:
        os.abort()

def test_gloo_terminates_on_other_dtypes(world):
    dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][world.rank]))

def test_gloo_terminates_on_other_shapes(world):
    dist.all_reduce(torch.ones([3, 100_000][world.rank]))

def test_native_stack_overflow(world):
    if world.rank == 1:
        nest = ()
        for _ in range(10**6):
            nest = (nest,)
        hash(nest)

def test_recursion(world):
    def again(n):
        return again(n + 1)  # and again
    if world.rank == 1:
        again(0)

def leave_memory(megabytes):
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), resource.RLIM_INFINITY))

def test_python_is_out_of_memory(world):
    if world.rank == 1:
        leave_memory(100)
        bytearray(1 << 30)

def test_torch_is_out_of_memory(world):
    if world.rank == 1:
        leave_memory(100)
        torch.empty(1 << 30, dtype=torch.uint8)

def test_bad_alloc(world):
    if world.rank == 1:
        value = "x" * (100 << 20)
        leave_memory(150)
        dist.HashStore().set("key", value)  # two copies more

def test_every_file_descriptor_is_closed(world):
    if world.rank == 1:
        os.closerange(3, 1000)
        raise ValueError("never heard of")

def test_a_thread_ends_the_rank_while_the_other_waits(world):
    if world.rank == 1:
        threading.Thread(target=os._exit, args=(9,)).start()
    dist.barrier()
    time.sleep(100)
"""


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("test_exit_0", "rank 1 of 2 exited with code 0"),
        ("test_exit_1", "rank 1 of 2 exited with code 1"),
        ("test_all_ranks_exit", "all 2 ranks exited with code 6"),
        ("test_the_first_rank_is_killed", "rank 0 of 2 died: SIGKILL"),
        ("test_terminated", "rank 1 of 2 died: SIGTERM"),
        ("test_signal_without_a_name", "rank 1 of 2 died: signal 40"),
        ("test_bad_pointer", "rank 1 of 2 died: SIGSEGV"),
        ("test_abort", "rank 1 of 2 died: SIGABRT"),
        ("test_native_stack_overflow", "rank 1 of 2 died: SIGSEGV"),
        ("test_every_file_descriptor_is_closed", "rank 1 of 2 "),
        ("test_a_thread_ends_the_rank_while_the_other_waits", "rank 1 of 2 exited with code 9"),
    ],
)
def test_a_death_names_the_rank_and_how_it_ended(session: FaultSession, name: str, how: str) -> None:
    assert session[name].outcomes == ["failure"]
    assert session[name].head()[0].startswith(how)
    assert session[name].seconds < 15  # the deadline is 30


@pytest.mark.parametrize("name", ["test_set_up", "test_tear_down"])
def test_a_death_is_told_of_the_phase_it_happened_in(session: FaultSession, name: str) -> None:
    assert session[name].outcomes == ["error"]
    assert session[name].head()[0] == "rank 1 of 2 died: SIGKILL"
    phase = name.removeprefix("test_").replace("_", "")
    assert session[name].message == f'failed on {phase} with "rank 1: died: SIGKILL"'


def test_a_rank_that_waits_for_a_dead_one_is_its_victim(session: FaultSession) -> None:
    place = session.place("# of rank 1")
    assert (
        session["test_the_first_rank_is_killed"].head()[1].startswith(f"rank 1: cut off by that at {place}")
    )


@pytest.mark.parametrize("name", ["test_bad_pointer", "test_abort", "test_native_stack_overflow"])
def test_a_crash_shows_the_python_line_it_happened_at(session: FaultSession, name: str) -> None:
    code = {"test_bad_pointer": "string_at(0)", "test_abort": "os.abort()"}.get(name, "hash(nest)")
    number = session.place(code).split(":")[1]
    assert f'test_faults.py", line {number} in {name}' in session[name].text
    assert session[name].head()[0].endswith(f", at test_faults.py:{number} in {name}")
    assert "/_pytest/" not in session[name].text


@pytest.mark.parametrize("kind", ["dtypes", "shapes"])
def test_a_crash_of_gloo_names_a_rank_of_the_collective(session: FaultSession, kind: str) -> None:
    verdict = session[f"test_gloo_terminates_on_other_{kind}"]
    assert verdict.outcomes == ["failure"]
    assert "all_reduce" in verdict.text
    assert f"in test_gloo_terminates_on_other_{kind}" in verdict.text


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
def test_what_python_can_still_report_is_a_failure_with_its_line(
    session: FaultSession, name: str, what: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head() == ["rank 1 of 2 failed", "rank 0: passed"]
    assert verdict.message.startswith(f"rank 1: {what}")
    assert f"in {name}" in verdict.text or f"def {name}" in verdict.text
