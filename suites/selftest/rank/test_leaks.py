"""What a test leaves in its rank is told and ended, and what it forks is no second rank."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.rank import leaks
from harness.rank.leaks import Leaks
from harness.rank.open_resources import OpenResources

SAMPLES = Path(__file__).parent / "leaking"
PASSED = {"setup": "passed", "call": "passed", "teardown": "passed"}


class Session:
    """A run of pytest over some test files, and what it told."""

    def __init__(self, path: Path, policy: str, *samples: str) -> None:
        self.path = path
        (path / "pytest.ini").write_text(f"[pytest]\nranks_preload =\nranks_leaks = {policy}\n")
        shutil.copy(SAMPLES / "telling.py", path / "conftest.py")
        shutil.copy(SAMPLES / "noting.py", path)
        for name in samples:
            shutil.copy(SAMPLES / f"{name}.py", path / f"test_{name}.py")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--world-timeout=20"]
        # Files, not pipes: those would be waited for as long as a process that is left holds them.
        with (path / "output.txt").open("w") as output:
            subprocess.run(command, cwd=path, stdout=output, stderr=output, timeout=120)
        self.told: dict[str, Any] = json.loads((path / "told.json").read_text())

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
    return Session(tmp_path_factory.mktemp("leaks"), "warn", "leaks", "state", "tidy", "forks")


def names_of(sample: str) -> set[str]:
    """The names of a sample's tests; those of a class with the class's name."""
    names = set()
    for node in ast.parse((SAMPLES / f"{sample}.py").read_text()).body:
        within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        functions = [each.name for each in functions if isinstance(each, ast.FunctionDef)]
        names |= {f"{within}{name}" for name in functions if name.startswith("test_")}
    return names


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
    line = (SAMPLES / "leaks.py").read_text().splitlines().index("def sleep_on():") + 2
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
    leaky = {*names_of("leaks"), *names_of("state"), "test_copy_that_stays"} - {
        "TestLeakyFixture::test_first",
        "test_healthy_after_leaks",
        "test_everything_is_put_back",
        "test_prints",
        "test_stacks_after_sigusr1_was_taken",
    }
    assert {name for name, told in session.told.items() if told["warnings"]} == leaky
    for name in names_of("tidy"):
        assert session.told[name]["outcomes"] == PASSED, session.told[name]["errors"]


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


@pytest.mark.parametrize("name", sorted(names_of("forks") - {"test_rank_that_dies_before_its_copy"}))
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
    assert told["errors"].startswith(
        "rank 1 of 2 died: SIGKILL\nrank 0: lost its connection to rank 1 at test_forks.py:"
    )
    assert told["alive"] == []


def test_under_error_the_test_that_leaves_something_fails_at_teardown(tmp_path: Path) -> None:
    session = Session(tmp_path, "error", "policies")
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
    session = Session(tmp_path, "off", "policies")
    assert [name for name, told in session.told.items() if told["warnings"] or told["alive"]] == []
    assert session.told["test_leaves"]["outcomes"] == PASSED
    assert len(session.pids("test_leaves")) == 1


def test_an_unknown_policy_is_refused_before_collection(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nranks_leaks = fail")
    with pytest.raises(pytest.UsageError, match=r"^ranks_leaks = 'fail': choose warn, error, off$"):
        pytester.parseconfigure()


def test_a_file_that_another_thread_is_about_to_close_is_not_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT)
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: os.close(file))
    monkeypatch.setattr(leaks, "time", clock)
    watch = Leaks.__new__(Leaks)
    watch._policy, watch._segments = "warn", set()
    nothing = frozenset[Any]()
    assert not watch._settle(OpenResources(nothing, nothing, frozenset({str(file)}), nothing))
