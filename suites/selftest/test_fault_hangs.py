"""A rank hangs: in Python, in a lock, a store or a collective, with the interpreter's lock, or stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

FAULTS = """
import ctypes, os, signal, subprocess, threading, time
import pytest, torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=1.5)

@pytest.mark.ranks(6, timeout=2)
def test_six_ways(world, tmp_path):
    def of_a_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # for ever
    def of_a_file_store():
        dist.FileStore(str(tmp_path / "store"), 1).get("never")
    def of_a_tcp_store():
        dist.TCPStore("127.0.0.1", 0, 1, True).get("never")
    def of_recv():
        dist.recv(torch.ones(1), 0)
    def of_a_child():
        subprocess.run(["sleep", "100"])
    def of_python():
        while True: pass
    (of_a_lock, of_a_file_store, of_a_tcp_store, of_recv, of_a_child, of_python)[world.rank]()

def test_loop(world):
    if world.rank == 1:
        while True: pass  # endless

def test_sleep_of_all(world):
    time.sleep(100)  # all

def test_barrier(world):
    if world.rank == 1:
        dist.barrier()  # alone

def test_power(world):
    if world.rank == 1:
        10 ** 10 ** 8  # power

def test_deaf_to_signals(world):
    if world.rank == 1:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        10 ** 10 ** 8

@pytest.mark.ranks(2, timeout=30)
def test_stopped(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

@pytest.fixture
def hangs_in_set_up(world):
    if world.rank == 1:
        time.sleep(100)  # early

def test_set_up(hangs_in_set_up):
    pass

@pytest.fixture
def hangs_in_tear_down(world):
    yield
    if world.rank == 1:
        time.sleep(100)  # late

def test_tear_down(hangs_in_tear_down):
    pass

def test_failure_while_the_other_computes(world):
    assert world.rank == 0
    while True: pass  # no collective

def test_failure_while_the_other_holds_the_gil(world):
    assert world.rank == 0
    10 ** 10 ** 8

def test_failure_in_a_thread_that_lives_on(world):
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
    assert world.rank == 0

def test_thread_that_lives_on(world):
    if world.rank == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()
"""


def test_the_next_test_of_the_file_runs_on_a_healthy_world(session: FaultSession) -> None:
    session.assert_healthy()


@pytest.mark.parametrize(
    ("rank", "code"),
    [
        (0, "# for ever"),
        (1, "dist.FileStore("),
        (2, "dist.TCPStore("),
        (3, "dist.recv("),
        (4, 'subprocess.run(["sleep"'),
    ],
)
def test_each_rank_that_hangs_is_named_with_its_line(session: FaultSession, rank: int, code: str) -> None:
    verdict = session["test_six_ways"]
    assert verdict.outcomes == ["failure"]
    (told,) = (line for line in verdict.head() if line.startswith(f"rank {rank}"))
    assert "still ran at the deadline of 2 s, in " in told
    assert session.place(code) in told
    assert verdict.seconds < 20  # a bound against hanging


@pytest.mark.parametrize(
    ("name", "outcome", "code"),
    [
        ("test_loop", "failure", "# endless"),
        ("test_set_up", "error", "# early"),
        ("test_tear_down", "error", "# late"),
    ],
)
def test_a_hang_is_told_of_the_rank_and_the_phase_it_happens_in(
    session: FaultSession, name: str, outcome: str, code: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == [outcome]
    assert verdict.head()[0].startswith("rank 1 of 2 still ran at the deadline of 1.5 s, in ")
    assert session.place(code) in verdict.head()[0]
    assert verdict.head()[1] == "rank 0: passed"


def test_a_hang_of_all_ranks_at_one_line_is_shown_once(session: FaultSession) -> None:
    verdict = session["test_sleep_of_all"]
    assert verdict.head()[0].startswith("all 2 ranks still ran at the deadline of 1.5 s, in ")
    assert verdict.text.count("time.sleep(100)  # all") == 1


def test_a_rank_that_waits_for_one_that_has_ended_does_not_wait_for_the_deadline(
    session: FaultSession,
) -> None:
    head = session["test_barrier"].head()
    assert head[0] == "rank 1 waits in barrier #1, which rank 0 never reached: it has ended the test"
    assert session.place("# alone") in head[1]


def test_a_rank_that_is_stopped_is_told_before_the_deadline(session: FaultSession) -> None:
    head = session["test_stopped"].head()
    assert head[0] == "rank 1 is stopped"
    assert head[1].startswith("rank 1 of 2 given up after ")


@pytest.mark.parametrize("name", ["test_power", "test_deaf_to_signals"])
def test_a_rank_that_cannot_answer_is_named_at_the_deadline(session: FaultSession, name: str) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith("rank 1 of 2 still ran at the deadline of 1.5 s, in ")
    assert verdict.head()[1] == "rank 0: passed"
    assert verdict.seconds < 20  # a bound against hanging


def test_a_rank_that_holds_the_gil_shows_its_line(session: FaultSession) -> None:
    place = f"{session.place('# power')} in test_power"
    assert session["test_power"].head()[0].endswith(f", in {place}, which holds the GIL")


@pytest.mark.parametrize("doing", ["computes", "holds_the_gil"])
def test_a_failure_does_not_wait_for_a_rank_that_would_not_notice(session: FaultSession, doing: str) -> None:
    verdict = session[f"test_failure_while_the_other_{doing}"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0] == "rank 1 of 2 failed"
    assert verdict.head()[1].startswith("rank 0: was in ")
    assert "deadline" not in verdict.text


def test_a_thread_that_a_test_has_left_keeps_no_rank(session: FaultSession) -> None:
    assert session["test_thread_that_lives_on"].outcomes == ["passed"]
    assert session["test_failure_in_a_thread_that_lives_on"].head() == [
        "rank 1 of 2 failed",
        "rank 0: passed",
    ]
