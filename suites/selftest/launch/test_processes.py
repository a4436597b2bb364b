"""Processes of ranks and their launcher, without a server: signals, ends, directories and limits."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import process_tree
from lockstep.exceptions import LaunchError
from lockstep.launch import bootstrap, limits, processes, server
from lockstep.launch.bootstrap import hold
from lockstep.launch.limits import check_open_files, explain
from lockstep.launch.processes import (
    ChildProcess,
    ProcessLauncher,
    RankProcess,
    RankProgram,
    _has_ended,
    is_of_torch,
)

SLEEPS = ("sleep", "1000")


class Child:
    """A process of `multiprocessing`, of which the server knows the exit code."""

    def __init__(self, pid: int, sentinel: int = -1, code: int = 255) -> None:
        self.pid, self.sentinel, self.exitcode = pid, sentinel, code
        self.done: list[object] = []

    def join(self, timeout: float) -> None:
        self.done.append(timeout)

    def kill(self) -> None:
        self.done.append("kill")


@pytest.fixture
def sleeping() -> Any:
    with subprocess.Popen(SLEEPS, start_new_session=True) as process:
        yield process
        process.kill()


def test_the_kernel_says_whether_a_child_lives(sleeping: Any) -> None:
    process: Any = Child(sleeping.pid)
    child = ChildProcess(process, lambda: True)
    assert child.sentinel == child._descriptor != process.sentinel
    assert (child.pid, child.is_alive(), child.exitcode) == (sleeping.pid, True, None)
    child.join(0)
    assert process.done == []
    child.kill()
    child.join(10)
    assert (child.is_alive(), child.exitcode, process.done) == (False, 255, [1.0])
    sleeping.wait()
    child.kill()
    assert process.done == [1.0]


def test_a_server_that_is_gone_knows_no_exit_code(sleeping: Any) -> None:
    sleeping.kill()
    for code, has_server, found in ((255, False, None), (255, True, 255), (3, False, 3)):
        process: Any = Child(sleeping.pid, code=code)
        child = ChildProcess(process, lambda has_server=has_server: has_server)
        child.join(10)
        assert child.exitcode == found


def test_without_descriptors_of_processes_the_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise ProcessLookupError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    reading, writing = os.pipe()
    process: Any = Child(1, reading)
    child = ChildProcess(process, lambda: True)
    assert (child.sentinel, child.is_alive()) == (reading, True)
    child.kill()
    assert process.done == ["kill"]
    os.close(writing)
    assert not child.is_alive()
    os.close(reading)


def test_a_killed_rank_ends_with_what_it_has_started(tmp_path: Path) -> None:
    program = (
        "import subprocess\nwith subprocess.Popen(['sleep', '60'], start_new_session=True) as process:\n"
        "    print(process.pid, flush=True)"
    )
    closed: list[str] = []
    with (
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
        ) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)  # where an assert fails; what it has started ends by itself then
        assert process.stdout is not None
        below = int(process.stdout.readline())
        child: Any = Child(process.pid)
        wire: Any = SimpleNamespace(close=lambda: closed.append("wire"))
        rank = RankProcess(ChildProcess(child, lambda: True), wire, "")
        assert (rank.pid, rank.is_alive(), rank.exitcode, rank.host) == (process.pid, True, None, "")
        assert rank.state() in ("S", "D", "R")
        descriptor = os.pidfd_open(below)
        rank.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert rank.state() == "T"
        rank.kill()
        rank.close()
        assert (rank.is_alive(), closed, child.done) == (False, ["wire"], [1.0])
        assert processes.wait([descriptor], 10)
        os.close(descriptor)
    assert rank.state() == ""
    rank.kill()


def test_a_process_that_has_got_the_number_of_a_rank_lives_on(launcher: Any, sleeping: Any) -> None:
    file = Path(launcher.directory, "ranks", str(sleeping.pid))
    file.write_text(process_tree.start_of(sleeping.pid))
    ended: Any = SimpleNamespace(pid=sleeping.pid, is_alive=lambda: False)
    rank = RankProcess(ended, None, "1")  # type: ignore[arg-type]
    rank.kill()
    launcher.forget(rank)
    assert file.exists()
    sleeping.terminate()
    assert sleeping.wait() == -signal.SIGTERM  # the first signal counts


def test_a_rank_that_only_seems_to_have_ended_is_killed(launcher: Any, sleeping: Any) -> None:
    """Without descriptors of processes, all that a server has forked seem so once it is gone."""
    file = Path(launcher.directory, "ranks", str(sleeping.pid))
    file.write_text(process_tree.start_of(sleeping.pid))
    unknown: Any = SimpleNamespace(pid=sleeping.pid, is_alive=lambda: False)
    rank = RankProcess(unknown, None, file.read_text())  # type: ignore[arg-type]
    rank.kill()
    assert sleeping.wait() == -signal.SIGKILL
    launcher.forget(rank)
    assert not file.exists()


def test_a_group_is_killed_though_its_leader_has_ended() -> None:
    program = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True, text=True
    ) as leader:
        assert leader.stdout is not None
        below = os.pidfd_open(int(leader.stdout.readline()))
        leader.wait()  # what it has started ends by itself, if it is not killed
        ended: Any = SimpleNamespace(pid=leader.pid, is_alive=lambda: False)
        RankProcess(ended, None, "1").kill()  # type: ignore[arg-type]
        assert processes.wait([below], 10)
        os.close(below)


def test_a_rank_is_as_its_process() -> None:
    child: Any = Child(5, sentinel=9, code=3)
    rank = RankProcess(child, None, "")  # type: ignore[arg-type]
    rank.join(0.5)
    assert (rank.pid, rank.sentinel, rank.exitcode, child.done) == (5, 9, 3, [0.5])
    assert (rank.is_lost, rank.moved) == (False, ())


@pytest.mark.parametrize(
    ("module", "expected"), [("torch", True), ("torch.x", True), ("torchvision", False), ("x.torch", False)]
)
def test_a_module_of_torch_is_known_by_its_name(module: str, expected: bool) -> None:
    assert is_of_torch(module) is expected


def test_a_program_names_what_the_server_imports() -> None:
    program = RankProgram("a.b:C", ("d",), ("e",), ("f",))
    assert program.imports() == {"modules": ("a.b", "d"), "preload": ("e",), "hints": ("f",)}


def test_a_process_has_ended_once_it_can_be_waited_for(sleeping: Any) -> None:
    assert not _has_ended(None)
    assert not _has_ended(sleeping.pid)
    sleeping.kill()
    os.waitid(os.P_PID, sleeping.pid, os.WEXITED | os.WNOWAIT)
    assert _has_ended(sleeping.pid)
    sleeping.wait()
    assert _has_ended(sleeping.pid)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A launcher with a directory of its own, and no server."""
    directory = tmp_path / "private"
    directory.mkdir()
    monkeypatch.setattr(processes, "private_directory", lambda: str(directory))
    monkeypatch.setattr(processes, "server_pid", lambda: None)
    return ProcessLauncher("forkserver", RankProgram("lockstep.rank:RankSession", preload=("mine",)))


def test_a_directory_that_was_removed_is_made_for_its_owner(launcher: Any, sleeping: Any) -> None:
    directory = Path(launcher.directory)
    (directory / "ranks" / "1").touch()
    launcher.restore_directory()
    assert (directory / "ranks" / "1").exists()
    processes.shutil.rmtree(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "server_pid", lambda: sleeping.pid)
        launcher.restore_directory()
    assert [each.stat().st_mode & 0o777 for each in (directory, directory / "ranks")] == [0o700] * 2
    assert sleeping.wait() == -9


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (
            {"failures": {"mine": "ImportError: x"}, "threads": 1},
            "ranks_preload: cannot import mine: Import",
        ),
        ({"failures": {}, "threads": 2}, "the server that ranks are forked from has 2 threads after its"),
    ],
)
def test_a_server_that_cannot_be_forked_from_is_refused(launcher: Any, status: object, why: str) -> None:
    server.status_path(launcher.directory).write_text(json.dumps(status))
    with pytest.raises(LaunchError, match=f"^{why}"):
        launcher._await_server(0.0)
    assert not launcher._checked


def test_a_server_is_asked_once_for_what_takes_long(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(processes.sys, "modules", {"torch._dynamo": None})
    server.status_path(launcher.directory).write_text('{"failures": {}, "threads": 1}')
    monkeypatch.setattr(processes, "server_pid", lambda: 7)
    launcher.expect("torch.distributed.fsdp")
    for _ in range(2):
        launcher._await_server(0.0)
    assert sent == [(7, server.IMPORT_MORE)]
    asked = json.loads(Path(launcher.directory, server.MORE_IMPORTS).read_text())
    assert asked == ["torch.distributed.fsdp", "torch._dynamo"]


def test_a_server_that_died_is_not_waited_for(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_has_ended", lambda pid: True)
    with pytest.raises(LaunchError, match=r"forked from died while importing torch, mine$"):
        launcher._await_server(float("inf"))
    launcher.forks = False
    launcher._await_server(float("inf"))


def test_the_server_starts_with_one_thread_of_blas(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(name: str, ignored: object) -> None:
        started.append((name, ignored, os.environ["OPENBLAS_NUM_THREADS"]))
        started.append(json.loads(os.environ[server.SETUP_VARIABLE]))

    monkeypatch.setattr(processes, "start_server", start)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    path = server.status_path(launcher.directory)
    path.touch()
    launcher._checked = True
    launcher.prestart()
    assert (launcher._checked, path.exists()) == (False, False)
    assert started[0] == (server.__name__, server.IGNORED, "1")
    imports = {"modules": ["lockstep.rank"], "preload": ["mine"], "hints": []}
    assert started[1] == {
        "sys_path": sys.path,
        "imports": imports,
        "directory": launcher.directory,
        "controller": os.getpid(),
    }
    assert server.SETUP_VARIABLE not in os.environ
    assert "OPENBLAS_NUM_THREADS" not in os.environ
    launcher.forks, launcher._checked = False, True
    monkeypatch.setattr(processes, "server_pid", lambda: 7)
    monkeypatch.setattr(processes, "_has_ended", lambda pid: pid != 7)
    launcher.prestart()
    assert (started[3]["imports"], launcher._checked) == (None, True)


def test_what_tests_left_ends_with_their_rank(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[set[int], float]] = []
    monkeypatch.setattr(processes, "end", lambda pids, patience: ended.append((pids(), patience)))
    monkeypatch.setattr(processes, "children_of", lambda pid: {1, 2, 3})
    ranks = Path(launcher.directory, "ranks")
    for pid in (1, 2):
        (ranks / str(pid)).touch()
    launcher.forget(SimpleNamespace(pid=1, began=""))
    assert (ended, [each.name for each in ranks.iterdir()]) == ([], ["2"])
    monkeypatch.setattr(processes, "server_pid", lambda: 7)
    launcher.forget(SimpleNamespace(pid=1, began=""))
    processes.shutil.rmtree(launcher.directory)
    launcher.forget(SimpleNamespace(pid=1, began=""))
    launcher.forks = False
    launcher.forget(SimpleNamespace(pid=1, began=""))
    assert ended == [({1, 3}, 0.0), (set(), 0.0)]


def test_a_launcher_that_stops_kills_a_server_that_imports(
    launcher: Any, sleeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    monkeypatch.setattr(processes, "stop_server", lambda: stopped.append(True))
    monkeypatch.setattr(processes, "server_pid", lambda: sleeping.pid)
    launcher._checked = True
    launcher.stop()
    assert sleeping.poll() is None
    os.rmdir(f"{launcher.directory}/ranks")
    os.rmdir(launcher.directory)
    launcher._checked = False
    launcher.stop()
    assert sleeping.wait() == -9
    assert (os.path.isdir(launcher.directory), len(stopped)) == (True, 2)


def test_a_rank_that_a_thread_lends_gets_the_loan(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    ends = [SimpleNamespace(name=name, close=lambda name=name: made.append(name)) for name in ("us", "them")]

    def process(**given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(start=lambda: made.append("start"), pid=0, sentinel=0)

    monkeypatch.setattr(launcher, "_context", SimpleNamespace(Pipe=lambda: ends, Process=process))
    launcher.loan = loan = SimpleNamespace(rank=1)
    launcher.forks = False
    for number, lent in ((0, None), (1, loan)):
        made.clear()
        spec: Any = SimpleNamespace(rank=number)
        rank = launcher._start_one(spec, None)
        given, *then = made
        assert given["args"] == ("lockstep.rank:RankSession", spec, ends[1], lent)
        assert (given["name"], given["daemon"], then) == (f"rank-{number}", False, ["start", "them"])
        assert rank.wire is ends[0]


def test_a_rank_with_a_wire_of_another_host_is_known_to_be_one(
    launcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    wire: Any = SimpleNamespace(close=lambda: closed.append("wire"))
    ends = [SimpleNamespace(close=lambda: closed.append("end")) for _ in range(2)]
    pids = iter([5, 6])

    def process(**given: Any) -> Any:
        return SimpleNamespace(start=lambda: None, pid=next(pids), sentinel=0, wire=given["args"][2])

    monkeypatch.setattr(launcher, "_context", SimpleNamespace(Pipe=lambda: ends, Process=process))
    monkeypatch.setattr(processes, "ChildProcess", lambda process, has_server: (process, has_server))
    ended: list[int] = []
    monkeypatch.setattr(processes, "server_pid", lambda: servers[-1])
    monkeypatch.setattr(processes, "_has_ended", ended.__contains__)
    servers = [7]
    spec: Any = SimpleNamespace(rank=0)
    with_pipe, with_wire = launcher._start_one(spec, None), launcher._start_one(spec, wire)
    child, has_server = with_wire.process
    assert (child.wire, with_wire.wire, with_pipe.wire) == (wire, wire, ends[0])
    assert closed == ["end", "wire"]
    assert os.listdir(f"{launcher.directory}/ranks") == ["6"]
    assert has_server()
    ended.append(7)
    assert not has_server()
    ended.clear()
    servers.append(8)
    assert not has_server()


# Limits


def test_open_files_are_counted_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: ["x"] * 10)
    for limit, is_enough in ((20, True), (19, False), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        if is_enough:
            check_open_files(2)
            continue
        why = "^2 ranks need about 20 open files and this process may have 19: .*, with `ulimit -n 1024`"
        with pytest.raises(LaunchError, match=why):
            check_open_files(2)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    with pytest.raises(LaunchError, match=r"about 3014 open files .* `ulimit -n 6028`"):
        check_open_files(1000)

    def refuse(path: str) -> list[str]:
        raise OSError

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 10))
    check_open_files(2)
    with pytest.raises(LaunchError, match="about 13 open files"):
        check_open_files(3)


def test_a_remedy_names_the_limits_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda number: ({7: 11}.get(number, 22),) * 2)
    monkeypatch.setattr(limits.tempfile, "tempdir", "/t")
    assert "may open 11 files" in explain(OSError(errno.ENFILE, "x"))
    assert "`ulimit -u` is 22;" in explain(OSError(errno.EAGAIN, "x"))
    for number in (errno.ENOSPC, errno.EDQUOT):
        assert explain(OSError(number, "x")).endswith("that has it (it is /t now)")
    for number in (errno.EROFS, errno.EACCES):
        assert "temporary directory (/t), set TMPDIR to one" in explain(OSError(number, "x"))
    monkeypatch.setattr(limits.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", "/u")
    monkeypatch.setattr(resource, "getrlimit", lambda number: (resource.RLIM_INFINITY,) * 2)
    assert "(it is /u now)" in explain(OSError(errno.ENOSPC, "x"))
    assert "`ulimit -u` is unlimited;" in explain(OSError(errno.EAGAIN, "x"))


# The first steps of a rank


def test_a_lock_is_shared_until_its_descriptor_is_closed(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    keepers = [hold(str(tmp_path / "lock")) for _ in range(2)]
    with (tmp_path / "lock").open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for each in keepers:
            os.close(each)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("worker", ["master", "gw3"])
def test_a_rank_takes_the_place_of_its_controller(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("close_server_pipe", "forget_start_method"):
        monkeypatch.setattr(bootstrap, name, lambda: None)
    for name in ("world", "ranks", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"OLD": "1"})
    monkeypatch.setattr(sys, "argv", ["old"])
    monkeypatch.setattr(sys, "path", ["old"])
    given = {"workerid": "rank-1", "workercount": 2, "testrunuid": "u"}
    session = SimpleNamespace(
        environ={"NEW": "1"},
        workerinput={"workerid": worker},
        argv=("new",),
        sys_path=("p",),
        cwd=str(tmp_path / "work"),
        captures=False,
    )
    spec: Any = SimpleNamespace(directory=str(tmp_path / "world"), session=session, workerinput=lambda: given)
    bootstrap._take_over(spec)
    assert (tmp_path / "ranks" / str(os.getpid())).exists()
    assert (sys.argv, sys.path, os.getcwd()) == (["new"], ["p"], str(tmp_path / "work"))
    xdist = {
        "PYTEST_XDIST_WORKER": "rank-1",
        "PYTEST_XDIST_WORKER_COUNT": "2",
        "PYTEST_XDIST_TESTRUNUID": "u",
    }
    assert os.environ == {"NEW": "1"} | (xdist if worker == "master" else {})
