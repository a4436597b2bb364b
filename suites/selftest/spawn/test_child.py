"""The first and last steps of a process that was forked for a test, and the files of its failure."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.spawn import child, failure, process_state
from lockstep.features.spawn.child import Program, Server, Setup
from lockstep.features.spawn.failure import failure_path, only_of_user, stacks_path
from lockstep.features.spawn.process_state import ProcessState, is_line_buffered, reopen_streams

STATE = ProcessState({"A": "1"}, (int(signal.SIGUSR1),), (), 0o022, (), {})
SERVER = Server("/d", {}, b"key")


# The first steps


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of `begin` in its process, in order."""
    noted: list[Any] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *given: noted.append((name, *given))

    for name in [
        "close_server_pipe",
        "reopen_streams",
        "record_failures",
        "_seed_generators",
        "_apply_variables",
        "_report_parent",
        "replace_parent_death_signal",
        "start_processes_by",
        "rewrite_asserts_of",
        "_run_startup_hooks",
    ]:
        monkeypatch.setattr(child, name, note(name))
    monkeypatch.setattr(child, "inherited_descriptors", lambda: [3, 4, 5, 6, 7])
    monkeypatch.setattr(child, "gc", SimpleNamespace(enable=note("enable"), unfreeze=note("unfreeze")))
    monkeypatch.setattr(child.os, "close", note("close"))
    monkeypatch.setattr(child.signal, "setitimer", note("timer"))
    monkeypatch.setattr(ProcessState, "take_over", lambda self: noted.append(("take over", self)))
    monkeypatch.setattr(sys, "excepthook", print)
    return noted


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_fork_becomes_a_new_process(steps: list[Any], method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "key" not in repr(SERVER)
    begin, given = Setup(STATE, SERVER, 77, method, ("m",)).__reduce__()
    begin(*given)
    assert sys.excepthook is sys.__excepthook__
    by_name = {step[0]: step[1:] for step in steps}
    assert [step[0] for step in steps] == [
        *("close_server_pipe", "reopen_streams", "timer", "take over", "record_failures", "close", "enable"),
        *("unfreeze", "_seed_generators", "_apply_variables", "_report_parent"),
        *("replace_parent_death_signal", "start_processes_by", "rewrite_asserts_of"),
        *(["_run_startup_hooks"] if method == "spawn" else []),
    ]
    assert by_name["reopen_streams"] == (4, 5)
    assert by_name["timer"] == (signal.ITIMER_REAL, 0)
    assert by_name["take over"] == by_name["_apply_variables"] == (STATE,)
    assert by_name["record_failures"] == ("/d",)
    assert by_name["close"] == (3,)
    assert by_name["_report_parent"] == (77, 6)
    assert by_name["rewrite_asserts_of"] == (("m",),)
    (start,) = by_name["start_processes_by"]
    assert start.__self__.server is SERVER
    assert start.__self__._rewritten() == ("m",)
    sent: list[Any] = []
    monkeypatch.setattr(child, "send_at_end_of", lambda *given: sent.append(given))
    by_name["replace_parent_death_signal"][0](9)
    assert sent == [(6, 9)]


def test_a_fork_begins_where_the_directory_is_gone(steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def record(directory: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(child, "record_failures", record)
    child.begin(STATE, SERVER, 77, "spawn", ())
    assert steps[-1] == ("_run_startup_hooks",)


@pytest.mark.parametrize(("method", "ends"), [("spawn", True), ("forkserver", False)])
def test_an_interpreter_ends_where_one_would(
    monkeypatch: pytest.MonkeyPatch, method: str, ends: bool
) -> None:
    noted: list[str] = []

    def flush() -> None:
        noted.append("flush")
        raise ValueError

    monkeypatch.setattr(
        child, "bootstrap", lambda process, sentinel: noted.append(f"{process} {sentinel}") or 3
    )
    monkeypatch.setattr(child, "threading", SimpleNamespace(_shutdown=lambda: noted.append("threads")))
    monkeypatch.setattr(child, "atexit", SimpleNamespace(_run_exitfuncs=lambda: noted.append("atexit")))
    monkeypatch.setattr(child, "flush_streams", flush)
    assert Program("p", method)._bootstrap(5) == 3  # type: ignore[arg-type]
    assert noted == ["p 5", *(["threads", "atexit", "flush"] if ends else [])]


def test_the_end_of_a_parent_is_seen_on_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getppid)
    reading, writing = os.pipe()
    child._report_parent(77, reading)
    assert (os.getppid(), child.is_over(reading)) == (77, False)
    os.close(writing)
    assert (os.getppid(), child.is_over(reading)) == (1, True)
    os.close(reading)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_signal_comes_at_the_end_of_a_parent(is_late: bool) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    reading, writing = os.pipe()
    known = {*os.listdir("/proc/self/fd")}
    try:
        if is_late:
            os.close(writing)
        child.send_at_end_of(reading, signal.SIGUSR2)
        assert got == ([signal.SIGUSR2] if is_late else [])
        if not is_late:
            os.close(writing)
            assert got == [signal.SIGUSR2]
    finally:
        for each in {*os.listdir("/proc/self/fd")} - known:
            if os.path.exists(f"/proc/self/fd/{each}"):
                os.close(int(each))
        os.close(reading)
        signal.signal(signal.SIGUSR2, before)


def test_generators_do_not_have_the_state_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    generator = SimpleNamespace(seed=lambda: seeded.append("torch"))
    fakes = {
        "numpy.random": SimpleNamespace(seed=lambda: seeded.append("numpy")),
        "torch": SimpleNamespace(default_generator=generator),
    }
    with monkeypatch.context() as patch:
        for name, fake in fakes.items():
            patch.setitem(sys.modules, name, fake)
        child._seed_generators()
        assert seeded == ["numpy", "torch"]
        for name in fakes:
            patch.delitem(sys.modules, name)
        child._seed_generators()
    assert seeded == ["numpy", "torch"]


@pytest.mark.parametrize(
    ("environ", "done"),
    [
        ({}, []),
        ({"OMP_NUM_THREADS": " 3 ,2"}, [3]),
        ({"OMP_NUM_THREADS": "0"}, []),
        ({"OMP_NUM_THREADS": "1"}, [1]),
        ({"OMP_NUM_THREADS": "x"}, []),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, ["debug"]),
    ],
)
def test_variables_that_torch_reads_as_it_is_imported_are_applied(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], done: list[Any]
) -> None:
    noted: list[Any] = []
    distributed = SimpleNamespace(set_debug_level_from_env=lambda: noted.append("debug"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=noted.append))
        patch.setitem(sys.modules, "torch.distributed", distributed)
        child._apply_variables(replace(STATE, environ=environ))
        assert noted == done
        patch.delitem(sys.modules, "torch.distributed")
        child._apply_variables(replace(STATE, environ={"TORCH_DISTRIBUTED_DEBUG": "INFO"}))
        patch.delitem(sys.modules, "torch")
        child._apply_variables(replace(STATE, environ=environ))
    assert noted == done


def test_what_interpreters_run_as_they_start_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []

    def run_path(path: str, run_name: str) -> None:
        noted.append((path, run_name))
        raise ValueError

    monkeypatch.setattr(child, "runpy", SimpleNamespace(run_path=run_path))
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(__file__="/s.py"))
    monkeypatch.setitem(sys.modules, "usercustomize", SimpleNamespace())
    coverage = SimpleNamespace(
        process_startup=lambda: noted.append("coverage"), Coverage=SimpleNamespace(current=lambda: None)
    )
    monkeypatch.setitem(sys.modules, "coverage", coverage)
    for name in child._COVERAGE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    child._run_startup_hooks()
    assert noted == [("/s.py", "sitecustomize")]
    for name in child._COVERAGE_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "x")
            child._run_startup_hooks()
    assert noted[1:] == [("/s.py", "sitecustomize"), "coverage"] * 2


# The state of a process


def test_a_process_hands_its_state_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_TEST", "1")
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    umask = os.umask(0o027)
    try:
        state = ProcessState.capture()
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGUSR2, before)
    assert state.environ == dict(os.environ)
    assert signal.SIGUSR2 in state.ignored
    assert signal.SIGUSR1 not in state.ignored
    assert signal.SIGUSR1 in state.blocked
    assert state.umask == 0o027
    assert state.processors == tuple(sorted(os.sched_getaffinity(0)))
    assert state.limits["RLIMIT_NOFILE"] == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert len(state.limits) == 7


def test_the_umask_is_found_without_the_kernels_word(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o027)
    try:
        for read in (lambda path: "Name: x", lambda path: (_ for _ in ()).throw(OSError())):
            with monkeypatch.context() as patch:
                patch.setattr(process_state.Path, "read_text", read)
                assert process_state._umask() == 0o027
                assert process_state._umask() == 0o027
        with monkeypatch.context() as patch:
            patch.setattr(process_state.Path, "read_text", lambda path: "Name:\tx\nUmask:\t0013\n")
            assert process_state._umask() == 0o013
    finally:
        os.umask(before)


def test_a_process_takes_a_state_over(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    masks: list[Any] = []
    noted: list[Any] = []
    monkeypatch.setattr(process_state.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(process_state.signal, "pthread_sigmask", lambda *given: masks.append(given))
    monkeypatch.setattr(process_state.os, "umask", lambda mask: noted.append(("umask", mask)))
    monkeypatch.setattr(process_state.os, "environ", {"OLD": "1"})
    monkeypatch.setattr(process_state.os, "sched_getaffinity", lambda pid: {1, 0})
    monkeypatch.setattr(process_state.os, "sched_setaffinity", lambda *given: noted.append(given))
    limits = {"RLIMIT_CORE": (0, 1), "RLIMIT_CPU": (5, 6)}

    def set_limit(number: int, limit: tuple[int, int]) -> None:
        noted.append((number, limit))
        raise ValueError

    monkeypatch.setattr(process_state.resource, "getrlimit", lambda number: (5, 6))
    monkeypatch.setattr(process_state.resource, "setrlimit", set_limit)
    replace(STATE, blocked=(2,), processors=(0,), limits=limits).take_over()
    assert os.environ == {"A": "1"}
    assert handlers[signal.SIGUSR1] is signal.SIG_IGN
    assert handlers[signal.SIGUSR2] is handlers[signal.SIGTERM] is signal.SIG_DFL
    assert handlers[signal.SIGINT] is signal.default_int_handler
    assert handlers[signal.SIGPIPE] is handlers[signal.SIGXFSZ] is signal.SIG_IGN
    assert handlers.keys() == {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}
    assert masks == [(signal.SIG_SETMASK, (2,))]
    assert noted == [("umask", 0o022), (0, (0,)), (resource.RLIMIT_CORE, (0, 1))]
    noted.clear()
    replace(STATE, processors=(0, 1)).take_over()
    STATE.take_over()
    assert noted == [("umask", 0o022)] * 2


def test_streams_lead_where_the_descriptors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    stream = SimpleNamespace(
        flush=lambda: noted.append("flush"), reconfigure=lambda **given: noted.append(given)
    )
    monkeypatch.setattr(process_state.sys, "stdout", stream)
    monkeypatch.setattr(process_state.sys, "stderr", SimpleNamespace(flush=lambda: noted.append("err")))
    monkeypatch.setattr(process_state.os, "dup2", lambda *given: noted.append(given))
    monkeypatch.setattr(process_state, "is_line_buffered", lambda descriptor: f"of {descriptor}")
    reopen_streams(7, 8)
    assert noted == ["flush", "err", (7, 1), (8, 2), {"line_buffering": "of 1"}]
    noted.clear()
    monkeypatch.setattr(process_state.sys, "stdout", SimpleNamespace(flush=lambda: None))
    reopen_streams(7, 8)
    assert noted == ["err", (7, 1), (8, 2)]


def test_a_pipe_is_not_line_buffered() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    assert not is_line_buffered(reading)
    os.close(reading)
    main, other = os.openpty()
    assert is_line_buffered(other)
    os.close(main)
    os.close(other)


# Its failure


def test_a_failure_is_recorded_for_its_callers_alone(tmp_path: Path) -> None:
    written: list[str] = []

    def caller(call: Callable[[], str]) -> str:
        return call()

    recording = failure._recording(lambda *given: f"text {given}", "/d", (caller.__code__,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure, "_write", written.append)
        assert recording(1) == "text (1,)"
        assert written == []
        assert caller(recording) == "text ()"
        assert written == ["/d"]

        def broken(directory: str) -> None:
            raise ValueError

        patch.setattr(failure, "_write", broken)
        assert caller(recording) == "text ()"


def test_a_process_has_a_file_of_its_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(
        failure.faulthandler, "register", lambda *given, **more: registered.append((given, more))
    )
    originals = traceback.format_exc, traceback.print_exc
    monkeypatch.setattr(traceback, "format_exc", originals[0])
    monkeypatch.setattr(traceback, "print_exc", originals[1])
    (tmp_path / "spawned").mkdir()
    path = stacks_path(str(tmp_path), os.getpid())
    path.touch(0o600)
    path.write_text("of another process of that number")
    failure.record_failures(str(tmp_path))
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("", 0o600)
    assert path == tmp_path / "spawned" / f"{os.getpid()}.stacks"
    ((given, more),) = registered
    assert given == (signal.SIGTERM,)
    assert (more["all_threads"], more["chain"]) == (True, True)
    assert os.readlink(f"/proc/self/fd/{more['file']}") == str(path)
    assert not os.get_inheritable(more["file"])
    os.close(more["file"])
    assert traceback.format_exc is not originals[0]
    assert traceback.print_exc is not originals[1]
    assert traceback.format_exc() == "NoneType: None\n"


def test_the_report_of_a_failure_is_written_as_pytest_shows_it(tmp_path: Path) -> None:
    (tmp_path / "spawned").mkdir()
    saved: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        save = failure._save
        patch.setattr(failure, "_save", lambda *given: saved.append(given) or save(*given))
        try:
            raise ValueError("of the user")
        except ValueError:
            failure._write(str(tmp_path))
    path = failure_path(str(tmp_path), os.getpid())
    assert [file.name for file in path.parent.iterdir()] == [f"{os.getpid()}.failure"]
    (first, at, native), (other, also_at, long) = saved
    assert (first, at) == (other, also_at) == (path, at)
    assert "Traceback (most recent call last)" in str(native)
    assert "def test_the_report_of_a_failure" in str(long)
    assert "def test_the_report_of_a_failure" not in str(native)
    report = pickle.loads(path.read_bytes())
    assert (report["outcome"], report["when"], report["start"], report["stop"]) == ("failed", "call", at, at)
    assert "of the user" in str(report["longrepr"])


class Entry:
    """An entry of a traceback."""

    def __init__(self, path: str, style: str = "long") -> None:
        self.path = path
        self.style = style

    def with_repr_style(self, style: str) -> Entry:
        return Entry(self.path, style)

    def __repr__(self) -> str:
        return f"{self.path} {self.style}"


class Entries(list[Entry]):
    """A traceback."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Entries(found) if isinstance(key, slice) else found

    def filter(self, by: Any) -> Entries:
        keeps = by if callable(by) else lambda each: each.path != "/hidden.py"
        return Entries(filter(keeps, self))


INSTALLED = "/x/site-packages/y.py"
ABOVE = "/python/multiprocessing/process.py"
OURS = f"{Path(failure.__file__).parent}/rank.py"


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (
            [ABOVE, "/torch/multiprocessing/spawn.py", "/a.py", "/hidden.py", "/b.py", "/c.py"],
            ["/a.py long", "/b.py short", "/c.py long"],
        ),
        (["/pytest.py", OURS, OURS, ABOVE, "/a.py"], [f"{ABOVE} long", "/a.py long"]),
        ([INSTALLED, "/a.py", INSTALLED], [f"{INSTALLED} short", "/a.py short", f"{INSTALLED} short"]),
        ([ABOVE], [f"{ABOVE} long"]),
    ],
)
def test_a_traceback_begins_at_the_function(paths: list[str], shown: list[str]) -> None:
    excinfo = SimpleNamespace(traceback=Entries(map(Entry, paths)))
    assert [*map(repr, failure.from_the_function_on(excinfo))] == shown


def test_a_first_report_has_frames_of_the_user_alone() -> None:
    excinfo = SimpleNamespace(traceback=Entries(map(Entry, [INSTALLED, "/a.py", "<string>"])))
    assert [*map(repr, only_of_user(excinfo))] == ["/a.py long"]
