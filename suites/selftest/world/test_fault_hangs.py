"""A rank hangs: in Python, in a lock, a store or a collective, with the interpreter's lock, or stopped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import FaultSession

FAULTS = """
import ctypes, os, pathlib, signal, subprocess, threading, time
import pytest
if "RANK" in os.environ:
    import torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2, timeout=1)

def hold_the_gil():
    10 ** 10 ** 8  # for ever

def sleep_with_the_gil():
    ctypes.PyDLL(None).sleep(100)  # which a signal would end

@pytest.mark.ranks(9, timeout=2)
def test_nine_ways(world, tmp_path):
    def of_a_lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # again
    def of_a_file_store():
        dist.FileStore(str(tmp_path / "store"), 1).get("never")
    def of_a_tcp_store():
        dist.TCPStore("127.0.0.1", 0, 1, True).get("never")
    def of_recv():
        dist.recv(torch.ones(1), 0)
    def of_a_child():
        subprocess.run(["sleep", "100"])
    def of_python():
        while True: pass  # in Python
    def deaf():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        sleep_with_the_gil()
    def stopped():
        os.kill(os.getpid(), signal.SIGSTOP)
    ways = (of_a_lock, of_a_file_store, of_a_tcp_store, of_recv, of_a_child, of_python, hold_the_gil)
    (*ways, deaf, stopped)[world.rank]()

def test_sleep_of_all(world):
    time.sleep(100)  # all

def test_barrier(world):
    if world.rank == 1:
        dist.barrier()  # alone

def test_sleep_with_the_gil(world):
    if world.rank == 1:
        sleep_with_the_gil()

@pytest.mark.ranks(2, timeout=30)
def test_stopped(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

def test_loop_while_the_other_waits(world):
    if world.rank == 1:
        while True: pass
    dist.barrier()

def test_stop_while_the_other_waits(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()

def test_gil_while_the_other_waits(world):
    if world.rank == 1:
        sleep_with_the_gil()
    dist.barrier()

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

def test_sleep_in_a_point(world, run_subtests):
    def claim(n):
        if world.rank == 1:
            time.sleep(100)  # in a point
    run_subtests({"n": [1]}, claim)

@pytest.fixture
def clears_up_slowly(world):
    yield
    if world.rank == 0:
        time.sleep(1.2)
        pathlib.Path("cleared.txt").touch()

@pytest.mark.ranks(2, timeout=30)
def test_failure_while_the_other_clears_up(world, clears_up_slowly):
    assert world.rank == 0, "the only news"

def test_failure_while_the_other_computes(world):
    assert world.rank == 0
    while True: pass  # no collective

def test_failure_while_the_other_holds_the_gil(world):
    assert world.rank == 0
    hold_the_gil()

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
        (0, "# again"),
        (1, "dist.FileStore("),
        (2, "dist.TCPStore("),
        (3, "dist.recv("),
        (4, 'subprocess.run(["sleep"'),
        (5, "# in Python"),
        (6, "# for ever"),
    ],
)
def test_each_rank_that_hangs_is_named_with_its_line(session: FaultSession, rank: int, code: str) -> None:
    verdict = session["test_nine_ways"]
    assert verdict.outcomes == ["failure"]
    (told,) = (line for line in verdict.head() if line.startswith(f"rank {rank}"))
    assert "still ran at the deadline of 2 s, in " in told
    assert session.place(code) in told
    assert verdict.seconds < 30  # a bound against hanging


@pytest.mark.parametrize("rank", [7, 8])
def test_a_rank_that_cannot_answer_is_named_all_the_same(session: FaultSession, rank: int) -> None:
    told = [line for line in session["test_nine_ways"].head() if line.startswith(f"rank {rank}")]
    assert any("still ran at the deadline of 2 s, in " in line for line in told)


@pytest.mark.parametrize(("name", "code"), [("test_set_up", "# early"), ("test_tear_down", "# late")])
def test_a_hang_is_told_of_the_rank_and_the_phase_it_happens_in(
    session: FaultSession, name: str, code: str
) -> None:
    verdict = session[name]
    assert verdict.outcomes == ["error"]
    assert verdict.message.startswith(f"failed on {name.removeprefix('test_').replace('_', '')} with ")
    assert verdict.head()[0].startswith("rank 1 of 2 still ran at the deadline of 1 s, in ")
    assert session.place(code) in verdict.head()[0]
    assert verdict.head()[1] == "rank 0: passed"


def test_a_hang_of_all_ranks_at_one_line_is_shown_once(session: FaultSession) -> None:
    verdict = session["test_sleep_of_all"]
    assert verdict.head()[0].startswith("all 2 ranks still ran at the deadline of 1 s, in ")
    assert verdict.text.count("time.sleep(100)  # all") == 1


def test_a_rank_that_waits_for_one_that_has_ended_is_told_with_its_line(session: FaultSession) -> None:
    verdict = session["test_barrier"]
    sentence = r"rank 1 waits in barrier #\d+, which rank 0 never reached: it has ended the test"
    assert re.fullmatch(sentence, verdict.head()[0])
    assert session.place("# alone") in verdict.head()[1]


def test_a_rank_that_is_stopped_is_told_before_the_deadline(session: FaultSession) -> None:
    head = session["test_stopped"].head()
    assert head[0] == "rank 1 is stopped"
    assert head[1].startswith("rank 1 of 2 ended by the harness after ")


def test_looking_at_a_rank_that_holds_the_gil_does_not_wake_it(session: FaultSession) -> None:
    verdict = session["test_sleep_with_the_gil"]
    assert verdict.outcomes == ["failure"]
    assert verdict.head()[0].startswith("rank 1 of 2 still ran at the deadline of 1 s, in ")
    assert session.place("# which a signal would end") in verdict.head()[0]


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("loop", "never reached: it is at test_faults.py:"),
        ("stop", "did not reach: it is stopped"),
        ("gil", "did not reach: it does not answer, at test_faults.py:"),
    ],
)
def test_a_rank_that_hangs_is_blamed_for_the_one_that_waits(
    session: FaultSession, what: str, where: str
) -> None:
    verdict = session[f"test_{what}_while_the_other_waits"]
    assert verdict.outcomes == ["failure"]
    assert re.match(r"rank 0 waits in barrier #\d+, which rank 1 " + re.escape(where), verdict.head()[0])
    # The deadline comes at the moment when a standstill would be told.
    assert re.match(
        r"rank 1 of 2 (still ran at the deadline of 1 s|ended by the harness after)", verdict.head()[1]
    )


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


def test_a_rank_that_hangs_in_a_point_is_to_blame_and_not_the_one_that_waits_at_its_end(
    session: FaultSession,
) -> None:
    head = session["test_sleep_in_a_point"].head()
    place = f"{session.place('# in a point')} in claim"
    assert head[0] == f"rank 0 waits at the end of [n=1] for rank 1: rank 1 is at {place}"
    assert head[1].startswith("rank 1 of 2 still ran at the deadline of 1 s, in ")


def test_a_rank_that_clears_up_is_left_to_do_so(session: FaultSession) -> None:
    verdict = session["test_failure_while_the_other_clears_up"]
    assert "the only news" in verdict.message
    assert (session.path / "cleared.txt").exists()
