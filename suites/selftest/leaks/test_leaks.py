"""Resources and state that a test leaves in its rank, and processes that it forks there."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.leaks import guard as leaks
from lockstep.features.leaks.guard import LeakGuard, OpenResources
from suites.selftest.project import PROJECTS, WITHOUT_PLUGINS, Project, copy_project, line_of, wait_for
from suites.selftest.warm_pytest import run_module

SAMPLES = PROJECTS / "leaking"
PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}


class Session:
    """A run of pytest over some test files, and its reports by test."""

    def __init__(self, path: Path, policy: str, *samples: str, backend: str = "gloo") -> None:
        self.path = copy_project("leaking", path)
        # Since Python 3.12 it warns of forks in a process with threads, which gloo gives every rank.
        ignored = "filterwarnings = ignore:.*is multi-threaded, use of fork:DeprecationWarning"
        (path / "pytest.ini").write_text(f"[pytest]\nranks_leaks = {policy}\n{ignored}\n")
        files = [f"test_{name}.py" for name in samples]
        options = ("-p", "no:cacheprovider", "--world-timeout=20", f"--backend={backend}")
        run_module("pytest", *options, *files, cwd=path, environ=os.environ | WITHOUT_PLUGINS, timeout=120)
        self.reports: dict[str, Any] = json.loads((path / "reports.json").read_text())

    def left(self, name: str, category: str = "RankLeakWarning") -> str:
        """Return what the one warning says that rank 1 has left."""
        ((of, text),) = self.reports[name]["warnings"]
        start = "rank 1: the test left behind "
        assert of == category
        assert text.startswith(start)
        return str(text.removeprefix(start))

    def pids(self, name: str) -> list[str]:
        """Return the processes that a test has noted, or a fixture that it was the first to request."""
        lines = [line.split() for line in (self.path / "pids.txt").read_text().splitlines()]
        return [pid for test, pid in lines if test == name]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(tmp_path_factory.mktemp("leaks"), "warn", "leaks", "state", "tidy", "forks")


@pytest.fixture(scope="module", params=["gloo", "shm"])
def either(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, session: Session
) -> Session:
    """Tests whose ranks have the threads and files of either backend, and fork, or leave nothing."""
    if request.param == "gloo":
        return session
    return Session(tmp_path_factory.mktemp("shm"), "warn", "tidy", "forks", backend="shm")


def names_of(sample: str) -> set[str]:
    """Return the names of a sample's tests; those of a class with the class's name."""
    names = set()
    for node in ast.parse((SAMPLES / f"test_{sample}.py").read_text()).body:
        within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        functions = [each.name for each in functions if isinstance(each, ast.FunctionDef)]
        names |= {f"{within}{name}" for name in functions if name.startswith("test_")}
    return names


def test_a_process_that_is_left_is_reported_with_its_command(session: Session) -> None:
    for name in ("test_child", "test_orphan_in_a_session_of_its_own"):
        (pid,) = session.pids(name)
        assert session.left(name) == f"process {pid} (sleep 300), which was ended"


def test_a_process_that_is_left_is_reported_with_its_children(session: Session) -> None:
    shell, sleep = session.left("test_tree_that_ignores_sigterm").split("; process ")
    above, below = session.pids("test_tree_that_ignores_sigterm")
    assert shell.startswith(f"process {above} (sh -c trap")
    assert sleep == f"{below} (sleep 300), which was ended"


def test_a_forked_process_that_is_left_is_reported_by_its_name(session: Session) -> None:
    assert "multiprocessing's Bob)" in session.left("test_process_of_multiprocessing")
    assert "(a fork of this rank)" in session.left("test_copy_that_stays")


def test_no_process_that_a_test_left_lives_on(session: Session) -> None:
    alive = {name: report["alive"] for name, report in session.reports.items() if report["alive"]}
    first = "TestLeakyFixture::test_first"
    assert alive == {first: session.pids(first)}


def test_a_thread_that_is_left_is_reported_with_its_line(session: Session) -> None:
    line = line_of("def sleep_on():", SAMPLES / "test_leaks.py") + 1
    place = f"{session.path}/test_leaks.py:{line}"
    assert session.left("test_thread") == f"thread 'sleeper' (runs sleep_on, now at {place})"


def test_open_files_and_sockets_are_reported_by_name(session: Session) -> None:
    assert session.left("test_file").startswith(f"file {session.path}/kept.txt, open as descriptor ")
    port = (session.path / "port.txt").read_text()
    assert session.left("test_socket").startswith(f"socket AF_INET 127.0.0.1:{port}, open as descriptor ")


def test_shared_memory_is_reported_and_gone_after_the_run(session: Session) -> None:
    name = (session.path / "segment.txt").read_text()
    assert session.left("test_segment") == f"shared memory /dev/shm/{name}"
    # multiprocessing's tracker sees to it, as soon as it notices the end of the run.
    wait_for(lambda: not Path(f"/dev/shm/{name}").exists(), "the segment is gone", 20)


def test_files_in_the_traceback_of_a_failed_test_are_no_leak(session: Session) -> None:
    left = session.left("test_child_of_a_failed_test")
    (pid,) = session.pids("test_child_of_a_failed_test")
    assert left == f"process {pid} (sleep 300), which was ended"


def test_a_process_of_a_wide_fixture_is_a_leak_after_its_end(session: Session) -> None:
    assert session.reports["TestLeakyFixture::test_first"]["warnings"] == []
    warnings = session.reports["TestLeakyFixture::test_last"]["warnings"]
    ((_, text),) = warnings  # of both ranks, whose processes have numbers of their own
    assert re.fullmatch(
        r"the test left behind process \d+ \(.*\), which was ended \(rank 0; the others differ from it in "
        r"numbers alone\)",
        text,
    )


def test_tidy_tests_have_no_warnings(either: Session) -> None:
    leaky = {*names_of("leaks"), *names_of("state"), "test_copy_that_stays"} - {
        "TestLeakyFixture::test_first",
        "test_healthy_after_leaks",
        "test_everything_is_put_back",
        "test_prints",
        "test_stacks_after_sigusr1_was_taken",
    }
    assert {name for name, report in either.reports.items() if report["warnings"]} == leaky & {
        *either.reports
    }
    for name in names_of("tidy"):
        assert either.reports[name]["outcomes"] == PASSED, either.reports[name]["errors"]


def test_signals_and_timers_are_restored_and_reported(session: Session) -> None:
    assert session.left("test_signals", "RankStateWarning").split("; ") == [
        "signal handlers: SIGTERM, SIGUSR1",
        f"blocked signals: {signal.SIGUSR2!s}",
        "pending alarm: True (was False)",
    ]
    assert session.reports["test_everything_is_put_back"]["outcomes"] == PASSED


def test_the_state_of_the_interpreter_is_restored_and_reported(session: Session) -> None:
    changes = session.left("test_interpreter", "RankStateWarning").split("; ")
    assert [line.split(":")[0] for line in changes] == [
        *("faulthandler", "garbage collection", "recursion limit", "sys path", "umask", "locale"),
    ]
    assert "sys path: /somewhere added" in changes
    assert "umask: 0o77 (was 0o22)" in changes
    assert changes[-1].startswith("locale: LC_NUMERIC=")
    assert session.left("test_limit", "RankStateWarning") == "resource limits: RLIMIT_NOFILE"


def test_a_stream_that_a_test_closes_stays_open(session: Session) -> None:
    assert session.left("test_closed_stream", "RankStateWarning") == "sys.stdout closed"
    assert session.reports["test_prints"]["outcomes"] == PASSED


def test_a_destroyed_default_group_is_reported(session: Session) -> None:
    left = session.left("test_destroyed_group", "RankStateWarning")
    assert left == "no default process group (the next test gets a new world)"


def test_stacks_are_shown_after_a_test_that_took_their_signal(session: Session) -> None:
    assert (
        "in test_stacks_after_sigusr1_was_taken"
        in session.reports["test_stacks_after_sigusr1_was_taken"]["errors"]
    )


@pytest.mark.parametrize("name", sorted(names_of("forks") - {"test_rank_that_dies_before_its_copy"}))
def test_the_outcome_of_a_test_that_forks_is_that_of_its_rank(either: Session, name: str) -> None:
    assert either.reports[name]["outcomes"] == PASSED, either.reports[name]["errors"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("test_copy_that_returns", "reached the end of its code there and was ended"),
        ("test_copy_that_raises", "raised ValueError: in the copy of True at {path}/test_forks.py:"),
        ("test_copy_that_exits", "exited with 7"),
        ("test_copy_of_a_fixture", "reached the end of its code there and was ended"),
        ("test_copy_in_a_subtest", "raised AssertionError: reported by the copy"),
    ],
)
def test_the_end_of_a_forked_child_is_in_the_output(either: Session, name: str, how: str) -> None:
    stderr = either.reports[name]["stderr"]
    assert "rank 1: process " in stderr
    assert f"forked by the test, {how.format(path=either.path)}" in stderr


def test_the_forked_child_of_a_dead_rank_is_ended(either: Session) -> None:
    report = either.reports["test_rank_that_dies_before_its_copy"]
    assert report["errors"].startswith(
        "rank 1 of 2 died: SIGKILL\nrank 0: lost its connection to rank 1 at test_forks.py:"
    )
    assert report["alive"] == []


def test_under_error_a_test_that_leaks_fails_at_teardown(tmp_path: Path) -> None:
    session = Session(tmp_path, "error", "policies")
    outcomes = {name: report["outcomes"] for name, report in session.reports.items()}
    assert outcomes["test_leaves"] == outcomes["test_leaves_state"] == {**PASSED, "teardown": "failed"}
    assert outcomes["test_fails_and_leaves"] == {**PASSED, "call": "failed"}
    assert outcomes["test_leaves_nothing"] == PASSED
    (pid,), (other,) = session.pids("test_leaves"), session.pids("test_fails_and_leaves")
    errors = session.reports["test_leaves"]["errors"]
    assert errors.startswith("rank 1 of 2 failed\nrank 0: passed")
    assert f"left behind process {pid} (sleep 300), which was ended; file {tmp_path}/kept.txt, open" in errors
    assert "left behind environ: LEFT (ranks_leaks = error)" in session.reports["test_leaves_state"]["errors"]
    assert session.left("test_fails_and_leaves") == f"process {other} (sleep 300), which was ended"
    assert not any(report["alive"] for report in session.reports.values())


def test_under_off_nothing_is_reported_and_processes_are_ended(tmp_path: Path) -> None:
    session = Session(tmp_path, "off", "policies")
    assert [name for name, report in session.reports.items() if report["warnings"] or report["alive"]] == []
    assert session.reports["test_leaves"]["outcomes"] == PASSED
    assert len(session.pids("test_leaves")) == 1


def test_an_unknown_policy_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nranks_leaks = fail")
    with pytest.raises(pytest.UsageError, match=r"^ranks_leaks = 'fail': choose warn, error, off$"):
        pytester.parseconfigure()


def test_the_compile_worker_of_torch_and_its_pipes_are_no_leak(project: Project) -> None:
    """Where inductor compiles for a GPU, it has one, and keeps both ends of two pipes to it."""
    project.write("""
from torch._inductor.compile_worker.subproc_pool import SubprocPool

def test_starts_it(world):
    SubprocPool.kept = SubprocPool(1) if world.rank == 1 else None

def test_comes_after_it(world):
    pass
""")
    output = project.run()
    assert "2 passed" in output
    assert "left behind" not in output


def test_the_compile_worker_is_known_by_a_path_longer_than_what_is_shown() -> None:
    path = f"{'/environment' * 20}/torch/_inductor/compile_worker/__main__.py"
    with (
        Popen(["sh", "-c", "read line", path], stdin=PIPE) as worker,
        Popen(["sh", "-c", "read line"], stdin=PIPE) as other,
    ):
        # Popen returns from an exec some moments before the system has the new command line.
        files = [Path(f"/proc/{each.pid}/cmdline") for each in (worker, other)]
        wait_for(lambda: all(file.read_bytes().startswith(b"sh") for file in files), "their command lines")
        left = OpenResources(frozenset({worker.pid, other.pid}))
        assert left.of_tests(set()).children == {other.pid}
        assert OpenResources(frozenset({other.pid})).describe() == [
            f"process {other.pid} (sh -c read line), which was ended"
        ]
        (shown,) = OpenResources(frozenset({worker.pid})).describe()
        assert shown.endswith("/environment/environ…), which was ended")


def test_pipes_are_reported_beside_a_process_of_a_wider_fixture(project: Project) -> None:
    project.write(
        """
import multiprocessing, os, time

@pytest.fixture(scope="module")
def process(world):
    started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    started.start()
    yield
    started.kill()
    started.join()

def test_starts_it(world, process):
    pass

def test_leaves_a_pipe(world, process):
    os.pipe()

def test_needs_it_still(world, process):
    pass
""",
        "filterwarnings = ignore:.*is multi-threaded, use of fork:DeprecationWarning",
    )
    output = project.run("-v")
    assert "3 passed" in output
    assert output.count("left behind") == output.count("left behind file pipe:[") == 1


def test_a_file_that_another_thread_closes_soon_is_no_leak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: os.close(file))
    monkeypatch.setattr(leaks, "time", clock)
    watch = LeakGuard.__new__(LeakGuard)
    watch._policy, watch._segments = "warn", set()
    assert not watch._settle(OpenResources(files=frozenset({str(file)})))


def test_files_that_another_thread_opens_one_after_the_other_are_no_leak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where it reads the sources of a traceback: each has the number of the last."""
    file = os.open(tmp_path / "first", os.O_CREAT)

    def open_the_next(seconds: float) -> None:
        os.close(file)
        assert os.open(tmp_path / "second", os.O_CREAT) == file

    moments = iter((0.0, 0.0, 1.0))
    clock = SimpleNamespace(monotonic=lambda: next(moments), sleep=open_the_next)
    monkeypatch.setattr(leaks, "time", clock)
    watch = LeakGuard.__new__(LeakGuard)
    watch._policy, watch._segments = "warn", set()
    assert not watch._settle(OpenResources(files=frozenset({str(file)})))
    os.close(file)
