"""What a test leaves in its rank is told and ended, and what it forks is no second rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank import leaks
from harness.rank.belongings import Belongings
from harness.rank.leaks import Leaks

HEADER = """
import gc, multiprocessing, os, pathlib, resource, signal, socket, subprocess, sys, threading, time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
import pytest, torch, torch.distributed as dist

pytestmark = pytest.mark.ranks(2)
kept = []
SLEEP = ["sleep", "300"]

def note(*pids):
    with open("pids.txt", "a") as file:
        name = os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[1].split()[0]
        file.writelines(f"{name} {pid}\\n" for pid in pids)

@pytest.fixture
def only(world):
    return world.rank == 1
"""

LEAKS = """
def test_child(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)

def test_orphan_in_a_session_of_its_own(only):
    if only:
        shell = "setsid sleep 300 > /dev/null & echo $!"
        note(int(subprocess.run(["sh", "-c", shell], stdout=subprocess.PIPE).stdout))

def test_tree_that_ignores_sigterm(only):
    if only:
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 300 & echo $!; wait"], stdout=-1)
        note(child.pid, int(child.stdout.readline()))

def test_process_of_multiprocessing(only):
    if only:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,), name="Bob")
        child.start()
        note(child.pid)

def sleep_on():
    time.sleep(300)

def test_thread(only):
    if only:
        threading.Thread(target=sleep_on, name="sleeper", daemon=True).start()

def test_file(only):
    if only:
        kept.append(open("kept.txt", "w"))

def test_socket(only):
    if only:
        kept.append(socket.create_server(("127.0.0.1", 0)))
        pathlib.Path("port.txt").write_text(str(kept[-1].getsockname()[1]))

def test_segment(only):
    if only:
        segment = SharedMemory(create=True, size=100)
        segment.close()
        pathlib.Path("segment.txt").write_text(segment.name)

def test_child_of_a_failed_test(only, tmp_path):
    if only:
        file = open(tmp_path / "in_the_traceback", "w")
        note(subprocess.Popen(SLEEP).pid)
        assert not only

@pytest.fixture(scope="class")
def leaky():
    child = subprocess.Popen(SLEEP)
    note(child.pid)
    return child

class TestLeakyFixture:
    def test_first(self, world, leaky): assert leaky.poll() is None
    def test_last(self, world, leaky): assert leaky.poll() is None

@pytest.mark.ranks(2, fresh=True)
def test_healthy_after_leaks(world):
    assert world.gather(world.rank) == [0, 1]
"""

STATE = """
def test_signals(world, only):
    pathlib.Path(f"pid-{world.rank}.txt").write_text(str(os.getpid()))
    if only:
        signal.alarm(100)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

def test_interpreter(only):
    if only:
        gc.disable(); sys.setrecursionlimit(77777); sys.path.insert(0, "/somewhere"); os.umask(0o077)
        import faulthandler, locale
        faulthandler.disable()
        locale.setlocale(locale.LC_NUMERIC, "C" if locale.setlocale(locale.LC_NUMERIC) != "C" else "C.UTF-8")

def test_limit(only):
    if only:
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def test_everything_is_put_back(world):
    import faulthandler
    pid = pathlib.Path(f"pid-{world.rank}.txt").read_text()
    assert pid == str(os.getpid()), "what cannot be put back costs a new world"
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert gc.isenabled() and sys.getrecursionlimit() != 77777 and "/somewhere" not in sys.path
    assert os.umask(0o022) == 0o022 and faulthandler.is_enabled()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 60

@pytest.mark.ranks(2, timeout=1.5)
def test_stacks_after_sigusr1_was_taken(only):
    if only:
        sum(range(10**12))

def test_closed_stream(only):
    if only:
        sys.stdout.close()

def test_prints(world):
    print("heard from", world.rank)

def test_destroyed_group(only):
    if only:
        dist.destroy_process_group()
"""

TIDY = """
def test_ends_what_it_starts(world, tmp_path):
    child = subprocess.Popen(SLEEP); child.kill(); child.wait()
    subprocess.Popen(["true"])
    thread = threading.Thread(target=time.sleep, args=(0.01,)); thread.start()
    os.close(os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY))
    segment = SharedMemory(create=True, size=100); segment.close(); segment.unlink()
    files = [open(tmp_path / "file")]; files.append(files); files[0].close()

def test_data_loader(world):
    loader = torch.utils.data.DataLoader(range(8), num_workers=2, collate_fn=lambda items: sum(items))
    assert sum(loader) == 28

def test_process_of_another_start_method(world):
    child = multiprocessing.get_context("forkserver").Process(target=abs, args=(1,))
    child.start(); child.join()
    assert child.exitcode == 0

def test_pools(world):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        assert pool.submit(abs, -1).result() == 1
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(abs, -1).result() == 1

def test_shared_tensors_and_native_threads(world):
    tensor = torch.ones(3).share_memory_()
    value = multiprocessing.Value("i", 1)
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda gradient: threading.current_thread() and None)
    weight.sum().backward()

def test_groups(world):
    group = dist.new_group(); dist.barrier(group); dist.destroy_process_group(group)

@pytest.fixture(scope="class")
def server(tmp_path_factory):
    child = subprocess.Popen(SLEEP)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait); thread.start()
    segment = SharedMemory(create=True, size=100)
    with open(tmp_path_factory.mktemp("server") / "log", "w"):
        yield child
    segment.close(); segment.unlink(); stop.set(); thread.join(); child.kill(); child.wait()

class TestTidyFixture:
    def test_first(self, world, server): assert server.poll() is None
    def test_between(self, world): pass
    def test_last(self, world, server): assert server.poll() is None
"""

FORKS = """
def wait_for(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def test_copy_that_returns(world, tmp_path):
    pid = os.fork()
    if pid == 0:
        return
    assert wait_for(pid) == 0
    assert tmp_path.exists()
    world.barrier()

def test_copy_that_raises(only):
    pid = os.fork()
    if pid == 0:
        raise ValueError(f"in the copy of {only}")
    assert wait_for(pid) == 1

def test_copy_that_exits(world):
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert wait_for(pid) == 7

@pytest.fixture
def forks():
    pid = os.fork()
    yield pid
    assert pid, "the copy came to the tear-down"

def test_copy_of_a_fixture(world, forks):
    assert wait_for(forks) == 0

def test_copy_in_a_subtest(world, subtests):
    with subtests.test("copied"):
        pid = os.fork()
        assert pid, "reported by the copy"
    assert wait_for(pid) == 1

def test_copy_in_a_point(world, run_subtests):
    def claim(n):
        pid = os.fork()
        assert pid, "voted by the copy"
        assert wait_for(pid) == 1
    run_subtests({"n": [1, 2]}, claim)

def test_copy_with_a_group_of_its_own(world):
    pid = os.fork()
    if pid == 0:
        assert not dist.is_initialized()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        os._exit(5)
    assert wait_for(pid) == 5
    assert world.gather(world.rank) == [0, 1]

def test_copy_that_stays(only):
    if only:
        pid = os.fork()
        if pid == 0:
            time.sleep(300)
        note(pid)

def test_rank_that_dies_before_its_copy(world):
    if world.rank == 1:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(300)
        note(pid)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def test_healthy_after_forks(world):
    assert world.gather(world.rank) == [0, 1]
"""

# In the controller: what pytest is told of each test, and which noted processes live when it is over.
CONFTEST = """
import json, os, pathlib

told = {}

def of(nodeid):
    start = {"outcomes": {}, "warnings": [], "errors": "", "stderr": "", "alive": []}
    return told.setdefault(nodeid.split("::", 1)[1], start)

def pytest_warning_recorded(warning_message, nodeid):
    if "RANK" not in os.environ:
        of(nodeid)["warnings"].append([warning_message.category.__name__, str(warning_message.message)])

def pytest_runtest_logreport(report):
    if "RANK" not in os.environ:
        it = of(report.nodeid)
        it["outcomes"][report.when] = report.outcome
        it["stderr"] = report.capstderr
        it["errors"] += report.longreprtext

def pytest_runtest_logfinish(nodeid):
    pids = pathlib.Path("pids.txt")
    if "RANK" not in os.environ and pids.exists():
        noted = [line.split()[1] for line in pids.read_text().splitlines()]
        of(nodeid)["alive"] = [pid for pid in noted if os.path.exists(f"/proc/{pid}")]

def pytest_sessionfinish():
    if "RANK" not in os.environ:
        pathlib.Path("told.json").write_text(json.dumps(told))
"""

PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}


class Session:
    """A run of pytest over some test files, and what it told."""

    def __init__(self, path: Path, policy: str, **files: str) -> None:
        self.path = path
        (path / "pytest.ini").write_text(f"[pytest]\nranks_leaks = {policy}\n")
        (path / "conftest.py").write_text(CONFTEST)
        for name, text in files.items():
            (path / f"test_{name}.py").write_text(HEADER + text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--world-timeout=20"]
        # Files, not pipes: those would be waited for as long as a process that is left holds them.
        with (path / "output.txt").open("w") as output:
            done = subprocess.run(command, cwd=path, stdout=output, stderr=output, timeout=120)
        self.returncode, self.output = done.returncode, (path / "output.txt").read_text()
        self.told: dict[str, Any] = {}
        if (path / "told.json").exists():
            self.told = json.loads((path / "told.json").read_text())

    def left(self, name: str, category: str = "RankLeakWarning") -> str:
        """What the one rank that left something left, as its one warning says it."""
        ((of, text),) = self.told[name]["warnings"]
        start = "rank 1: the test left behind "
        assert of == category
        assert text.startswith(start)
        return str(text.removeprefix(start))

    def pids(self, name: str) -> list[str]:
        """The processes that a test has noted, or a wide fixture when this test was the first to ask."""
        lines = [line.split() for line in (self.path / "pids.txt").read_text().splitlines()]
        return [pid for test, pid in lines if test == name]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    files = {"leaks": LEAKS, "state": STATE, "tidy": TIDY, "forks": FORKS}
    return Session(tmp_path_factory.mktemp("leaks"), "warn", **files)


def test_a_process_that_is_left_is_told_with_its_command(session: Session) -> None:
    for name in ("test_child", "test_orphan_in_a_session_of_its_own"):
        (pid,) = session.pids(name)
        assert session.left(name) == f"process {pid} (sleep 300), which was ended"


def test_a_process_that_is_left_is_told_with_all_below_it(session: Session) -> None:
    shell, sleep = session.left("test_tree_that_ignores_sigterm").split("; process ")
    above, below = session.pids("test_tree_that_ignores_sigterm")
    assert shell.startswith(f"process {above} (sh -c trap")
    assert sleep == f"{below} (sleep 300), which was ended"


def test_a_forked_process_that_is_left_is_told_by_its_name(session: Session) -> None:
    assert "multiprocessing's Bob)" in session.left("test_process_of_multiprocessing")
    assert "(a fork of this rank)" in session.left("test_copy_that_stays")


def test_no_process_that_a_test_left_lives_on(session: Session) -> None:
    alive = {name: told["alive"] for name, told in session.told.items() if told["alive"]}
    first = "TestLeakyFixture::test_first"
    assert alive == {first: session.pids(first)}


def test_a_thread_that_is_left_is_told_with_the_line_it_is_at(session: Session) -> None:
    line = (HEADER + LEAKS).splitlines().index("def sleep_on():") + 2
    place = f"{session.path}/test_leaks.py:{line}"
    assert session.left("test_thread") == f"thread 'sleeper' (runs sleep_on, now at {place})"


def test_open_files_and_sockets_are_told_by_name(session: Session) -> None:
    assert session.left("test_file").startswith(f"file {session.path}/kept.txt, open as descriptor ")
    port = (session.path / "port.txt").read_text()
    assert session.left("test_socket").startswith(f"socket AF_INET 127.0.0.1:{port}, open as descriptor ")


def test_shared_memory_that_is_left_is_told_and_gone_after_the_run(session: Session) -> None:
    name = (session.path / "segment.txt").read_text()
    assert session.left("test_segment") == f"shared memory /dev/shm/{name}"
    # multiprocessing's tracker sees to it, as soon as it notices the end of the run.
    deadline = time.monotonic() + 20
    while Path(f"/dev/shm/{name}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/dev/shm/{name}").exists()


def test_a_failed_test_is_not_told_of_the_files_in_its_traceback(session: Session) -> None:
    left = session.left("test_child_of_a_failed_test")
    (pid,) = session.pids("test_child_of_a_failed_test")
    assert left == f"process {pid} (sleep 300), which was ended"


def test_what_a_wide_fixture_starts_is_left_when_the_fixture_has_ended(session: Session) -> None:
    assert session.told["TestLeakyFixture::test_first"]["warnings"] == []
    warnings = session.told["TestLeakyFixture::test_last"]["warnings"]
    assert sorted(text.split(" process ")[0] for _, text in warnings) == [
        f"rank {rank}: the test left behind" for rank in (0, 1)
    ]


def test_nothing_is_told_where_nothing_is_left(session: Session) -> None:
    leaky = {*names_of(LEAKS + STATE), "test_copy_that_stays"} - {
        "TestLeakyFixture::test_first",
        "test_healthy_after_leaks",
        "test_everything_is_put_back",
        "test_prints",
        "test_stacks_after_sigusr1_was_taken",
    }
    assert {name for name, told in session.told.items() if told["warnings"]} == leaky
    for name in names_of(TIDY):
        assert session.told[name]["outcomes"] == PASSED, session.told[name]["errors"]


def names_of(tests: str) -> set[str]:
    """The names of the tests of a file; those of a class, all of it below the rest, with the class's name."""
    names = set()
    within = ""
    for line in tests.splitlines():
        words = line.replace("(", " ").replace(":", " ").split()
        if line.startswith(("class ", "def ")):
            within = f"{words[1]}::" if words[0] == "class" else ""
        if words[:1] == ["def"] and words[1].startswith("test_"):
            names.add(within + words[1])
    return names


def test_signals_and_timers_are_put_back_and_told(session: Session) -> None:
    assert session.left("test_signals", "RankStateWarning").split("; ") == [
        "signal handlers: SIGTERM, SIGUSR1",
        f"blocked signals: {signal.SIGUSR2!s}",
        "pending alarm: True (was False)",
    ]
    assert session.told["test_everything_is_put_back"]["outcomes"] == PASSED


def test_the_state_of_the_interpreter_is_put_back_and_told(session: Session) -> None:
    told = session.left("test_interpreter", "RankStateWarning").split("; ")
    assert [line.split(":")[0] for line in told] == [
        *("faulthandler", "garbage collection", "recursion limit", "sys path", "umask", "locale"),
    ]
    assert "sys path: /somewhere added" in told
    assert "umask: 0o77 (was 0o22)" in told
    assert told[-1].startswith("locale: LC_NUMERIC=")
    assert session.left("test_limit", "RankStateWarning") == "resource limits: RLIMIT_NOFILE"


def test_a_stream_that_a_test_closes_stays_open(session: Session) -> None:
    assert session.left("test_closed_stream", "RankStateWarning") == "sys.stdout closed"
    assert session.told["test_prints"]["outcomes"] == PASSED


def test_a_default_group_that_a_test_destroys_is_told(session: Session) -> None:
    left = session.left("test_destroyed_group", "RankStateWarning")
    assert left == "no default process group (the next test gets a new world)"


def test_stacks_are_shown_after_a_test_that_took_their_signal(session: Session) -> None:
    assert (
        "in test_stacks_after_sigusr1_was_taken"
        in session.told["test_stacks_after_sigusr1_was_taken"]["errors"]
    )


@pytest.mark.parametrize("name", sorted(names_of(FORKS) - {"test_rank_that_dies_before_its_copy"}))
def test_the_verdict_of_a_test_that_forks_is_the_ranks_own(session: Session, name: str) -> None:
    assert session.told[name]["outcomes"] == PASSED, session.told[name]["errors"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("test_copy_that_returns", "came to the end of what it ran there and was ended"),
        ("test_copy_that_raises", "raised ValueError: in the copy of True at {path}/test_forks.py:"),
        ("test_copy_that_exits", "exited with 7"),
        ("test_copy_of_a_fixture", "came to the end of what it ran there and was ended"),
        ("test_copy_in_a_subtest", "raised AssertionError: reported by the copy"),
    ],
)
def test_what_became_of_a_copy_is_told_in_the_output(session: Session, name: str, how: str) -> None:
    stderr = session.told[name]["stderr"]
    assert "rank 1: process " in stderr
    assert f"forked by the test, {how.format(path=session.path)}" in stderr


def test_a_rank_that_dies_before_its_copy_is_noticed_and_the_copy_ended(session: Session) -> None:
    told = session.told["test_rank_that_dies_before_its_copy"]
    assert told["errors"].startswith("rank 1 of 2 died: SIGKILL\nrank 0: cut off by that at test_forks.py:")
    assert told["alive"] == []


POLICIES = """
def test_leaves(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)
        kept.append(open("kept.txt", "w"))

def test_leaves_state(only):
    if only:
        os.environ["LEFT"] = "1"

def test_fails_and_leaves(only):
    if only:
        note(subprocess.Popen(SLEEP).pid)
        assert False, "its own failure"

def test_leaves_nothing(world):
    assert world.gather(world.rank) == [0, 1]
"""


def test_under_error_the_test_that_leaves_something_fails_at_teardown(tmp_path: Path) -> None:
    session = Session(tmp_path, "error", policies=POLICIES)
    outcomes = {name: told["outcomes"] for name, told in session.told.items()}
    assert outcomes["test_leaves"] == outcomes["test_leaves_state"] == {**PASSED, "teardown": "failed"}
    assert outcomes["test_fails_and_leaves"] == {**PASSED, "call": "failed"}
    assert outcomes["test_leaves_nothing"] == PASSED
    (pid,), (other,) = session.pids("test_leaves"), session.pids("test_fails_and_leaves")
    errors = session.told["test_leaves"]["errors"]
    assert errors.startswith("rank 1 of 2 failed\nrank 0: passed")
    assert f"left behind process {pid} (sleep 300), which was ended; file {tmp_path}/kept.txt, open" in errors
    assert "left behind environ: LEFT (ranks_leaks = error)" in session.told["test_leaves_state"]["errors"]
    assert session.left("test_fails_and_leaves") == f"process {other} (sleep 300), which was ended"
    assert not any(told["alive"] for told in session.told.values())


def test_under_off_nothing_is_told_and_processes_are_ended(tmp_path: Path) -> None:
    session = Session(tmp_path, "off", policies=POLICIES)
    assert [name for name, told in session.told.items() if told["warnings"] or told["alive"]] == []
    assert session.told["test_leaves"]["outcomes"] == PASSED
    assert len(session.pids("test_leaves")) == 1


def test_an_unknown_policy_is_refused_before_collection(tmp_path: Path) -> None:
    session = Session(tmp_path, "fail", policies="nonsense")
    assert session.returncode == pytest.ExitCode.USAGE_ERROR
    assert session.output.strip() == "ERROR: ranks_leaks = 'fail': choose warn, error, off"


def test_a_file_that_another_thread_is_about_to_close_is_not_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: os.close(file))
    monkeypatch.setattr(leaks, "time", clock)
    watch = Leaks.__new__(Leaks)
    watch._policy, watch._segments = "warn", set()
    nothing = frozenset[Any]()
    assert not watch._settle(Belongings(nothing, nothing, frozenset({str(file)}), nothing))
