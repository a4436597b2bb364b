"""Unit tests of the guard: what counts as left by a test, its name, and the memory that is given back."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.leaks import guard as leaks
from lockstep.features.leaks.guard import (
    FreedMemory,
    LeakGuard,
    OpenResources,
    _children,
    _name_of_file,
    _record_segments,
    _title_of,
    is_service,
)


def resources(children: str = "", threads: Any = (), files: str = "", segments: str = "") -> OpenResources:
    """Return resources by their names; of processes and descriptors these are numbers."""
    return OpenResources(
        frozenset(map(int, children.split())),
        frozenset(threads),
        frozenset(files.split()),
        frozenset(segments.split()),
    )


def test_what_was_opened_between_two_moments_is_added_and_what_was_closed_is_not() -> None:
    outer = resources("1 2", files="3", segments="a")
    changed = outer.with_changes(resources("2 5", files="3 4"), resources("5 6", files="3 7", segments="b"))
    assert changed == resources("1 6", files="3 7", segments="a b")
    assert outer - resources("1", files="3") == resources("2", segments="a")
    assert outer & resources("1 5", files="3") == resources("1", files="3")
    assert [bool(each) for each in (resources(), resources("1"), resources(segments="a"))] == [
        False,
        True,
        True,
    ]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[int | socket.socket], str]]:
    """Close at the end what it is given, and return its number."""
    numbers: list[int] = []

    def keep(given: int | socket.socket) -> str:
        numbers.append(given if isinstance(given, int) else given.detach())
        return str(numbers[-1])

    yield keep
    for number in numbers:
        os.close(number)


Opened = Callable[[int | socket.socket], str]


def test_descriptors_have_the_names_of_what_they_stand_for(tmp_path: Path, opened: Opened) -> None:
    file = opened(os.open(tmp_path / "a.txt", os.O_CREAT))
    assert _name_of_file(file) == f"file {tmp_path}/a.txt"
    os.set_inheritable(int(file), True)
    assert _name_of_file(file) == f"file {tmp_path}/a.txt"
    assert _name_of_file(opened(os.open(tmp_path, os.O_RDONLY))) == f"file {tmp_path}"
    assert _name_of_file(opened(os.pipe()[0])).startswith("file pipe:[")
    assert _name_of_file(opened(os.memfd_create("mine"))).startswith("file /memfd:mine")
    bare = opened(socket.socket(socket.AF_UNIX))
    assert _name_of_file(bare) == "socket AF_UNIX unnamed"
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    address = "{}:{}".format(*server.getsockname())
    client = socket.create_connection(server.getsockname())
    own = "{}:{}".format(*client.getsockname())
    assert _name_of_file(opened(client)) == f"socket AF_INET {own} to {address}"
    assert _name_of_file(opened(server)) == f"socket AF_INET {address}"


def test_descriptors_of_the_system_of_libraries_and_of_the_harness_are_no_leak(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = opened(socket.socket())
    os.set_inheritable(int(native), True)
    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    (tmp_path / "pymp-x").mkdir()
    of_multiprocessing = socket.socket(socket.AF_UNIX)
    of_multiprocessing.bind(str(tmp_path / "pymp-x" / "listener"))
    found = {
        "native": native,
        "closed": str(closed),
        "device": opened(os.open("/dev/null", os.O_RDONLY)),
        "shm": opened(os.memfd_create("lockstep-shm-1")),
        "lease": opened(os.open(tmp_path / "a.lockstep-lease", os.O_CREAT)),
        "event": opened(os.eventfd(0, os.EFD_CLOEXEC)),
        "multiprocessing": opened(of_multiprocessing),
    }
    assert {what: _name_of_file(number) for what, number in found.items()} == dict.fromkeys(found, "")
    pipe = opened(os.pipe()[0])
    monkeypatch.setattr(leaks, "service_processes", lambda: [(None, None), (7, int(pipe))])
    assert _name_of_file(pipe) == ""
    with closing(shared_memory.SharedMemory(create=True, size=8)) as segment:
        number = opened(os.open(f"/dev/shm/{segment.name}", os.O_RDONLY))
        assert _name_of_file(number) == f"file /dev/shm/{segment.name}"
        segment.unlink()


def sleeper(name: str, target: Callable[[], object]) -> threading.Thread:
    return threading.Thread(target=target, name=name, daemon=True)


def test_what_is_left_is_described_in_order_by_kind(opened: Opened, tmp_path: Path) -> None:
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(60)

    threads = [sleeper(name, wait) for name in ("b", "a")]
    for thread in threads:
        thread.start()
    first = int(opened(os.open(tmp_path, os.O_RDONLY)))
    # The first that are free: others may be of worlds that tests before this one have left warm.
    low, high = (opened(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, least)) for least in (900, 1000))
    pipe = opened(os.pipe()[0])
    left = resources("", threads, f"{high} {low} {pipe}", "two one")
    lines = left.describe()
    go_on.set()
    place = f"{__file__}:{wait.__code__.co_firstlineno + 1}"
    function = "test_what_is_left_is_described_in_order_by_kind.<locals>.wait"
    assert lines[:2] == [f"thread {name!r} (runs {function}, now at {place})" for name in "ab"]
    pipes = [line for line in lines if "pipe:" in line]
    assert [line.rpartition(" ")[2] for line in pipes] == [pipe]
    files = [line for line in lines[2:-2] if line not in pipes]
    assert files == [f"file {tmp_path}, open as descriptor {number}" for number in (low, high)]
    assert lines[-2:] == ["shared memory /dev/shm/one", "shared memory /dev/shm/two"]
    of_forks = left.describe(has_forks=True)
    assert [line for line in of_forks if line.startswith("file")] == files
    for thread in threads:
        thread.join(60)
    (ended,) = resources(threads=threads[:1]).describe()
    assert ended == "thread 'b' (runs Thread)"


def test_what_ended_and_what_others_made_is_left_out(opened: Opened, tmp_path: Path) -> None:
    ended = sleeper("ended", lambda: None)
    ended.start()
    ended.join(60)
    go_on = threading.Event()
    lives = sleeper("lives", lambda: go_on.wait(60))
    lives.start()
    file, device = opened(os.open(tmp_path, os.O_RDONLY)), opened(os.open("/dev/null", os.O_RDONLY))
    names = [f"torch_{os.getpid()}_{os.getpid()}_7", f"torch_{os.getpid() + 1}_1_7", "lockstep-test-other"]
    segments = [Path("/dev/shm", name) for name in names]
    for segment in segments:
        segment.touch()
    try:
        found = resources(str(2**22 - 1), [ended, lives], f"{file} {device}", " ".join([*names, "lost"]))
        left = found.of_tests({"lost", "lockstep-test-mine"})
        assert left == resources("", [lives], file, names[0])
        assert found.of_tests({names[2]}).segments == {names[0], names[2]}
    finally:
        go_on.set()
        for segment in segments:
            segment.unlink()


@pytest.mark.parametrize("name", ["InductorPool", "TMonitor", "destroys-groups", "waits-in-gloo"])
def test_a_thread_that_serves_a_process_to_its_end_is_no_leak(name: str) -> None:
    class InductorSubproc(threading.Thread):
        pass

    assert is_service(threading.Thread(name=name))
    assert is_service(InductorSubproc(name="x"))
    assert not is_service(threading.Thread(name="x"))


def test_segments_that_this_process_makes_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.SharedMemory, "__init__", shared_memory.SharedMemory.__init__)
    names: set[str] = set()
    _record_segments(names)
    with closing(shared_memory.SharedMemory(None, True, 8)) as segment:
        assert names == {segment.name}
        names.clear()
        shared_memory.SharedMemory(segment.name).close()
        assert names == set()
        segment.unlink()


def guard_of(monkeypatch: pytest.MonkeyPatch, policy: Any, *captured: OpenResources) -> LeakGuard:
    """Return a guard that finds these resources one after the other, all of them a test's."""
    monkeypatch.setattr(leaks, "adopt_orphans", lambda: None)
    monkeypatch.setattr(leaks, "_record_segments", lambda names: names.add("recorded"))
    monkeypatch.setattr(leaks, "end", lambda find, seconds: None)
    monkeypatch.setattr(OpenResources, "capture_children", lambda: OpenResources())
    monkeypatch.setattr(OpenResources, "of_tests", lambda self, made: self)
    moments = iter(captured)
    monkeypatch.setattr(OpenResources, "capture", lambda: next(moments))
    return LeakGuard(policy)


def test_what_is_there_after_a_test_and_was_not_before_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = resources(segments="a b"), resources(segments="b c")
    guard = guard_of(monkeypatch, "warn", before, after, after, after)
    collected: list[str] = []
    monkeypatch.setattr(leaks, "gc", SimpleNamespace(collect=lambda: collected.append("garbage")))
    guard.before()
    assert guard.after(raised=False) == ["shared memory /dev/shm/c"]
    assert guard.after(raised=True) == ()
    assert collected == ["garbage"]
    guard.before()
    assert guard._segments == {"recorded"}


def test_processes_alone_are_looked_for_where_leaks_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guard = guard_of(monkeypatch, "off")
    guard.before()
    assert guard.after(raised=False) == ()
    assert guard._segments == set()


def test_children_that_have_ended_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []

    def wait(pid: int, options: int) -> None:
        waited.append((pid, options))
        if pid == 1:
            raise ChildProcessError

    monkeypatch.setattr(leaks.os, "waitpid", wait)
    monkeypatch.setattr(leaks, "reap_popens", lambda: waited.append("popens"))
    active = SimpleNamespace(active_children=lambda: waited.append("multiprocessing"))
    monkeypatch.setattr(leaks, "multiprocessing", active)
    leaks._reap(frozenset())
    assert waited == []
    leaks._reap(frozenset({1, 2}))
    assert waited == ["multiprocessing", "popens", (1, os.WNOHANG), (2, os.WNOHANG)]


def test_a_process_without_children_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(leaks.os, "waitid", none)
    assert _children() == frozenset()
    monkeypatch.setattr(leaks.os, "waitid", lambda *_: None)
    below = {os.getpid(): {1, 2}, 2: {3}}
    monkeypatch.setattr(leaks, "children_of", lambda pid: below.get(pid, set()))
    monkeypatch.setattr(leaks, "service_processes", lambda: [(2, 5), (None, None), (9, 6)])
    assert _children() == {1, 3}


def test_a_process_that_is_gone_is_named_so_and_long_commands_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = {1: "", 2: "x" * 119, 3: "x" * 120, os.getpid(): "pytest", 4: "pytest", 5: "pytest"}
    monkeypatch.setattr(leaks, "_command_of", commands.get)
    child = SimpleNamespace(pid=5, name="Bob")
    monkeypatch.setattr(leaks.multiprocessing, "active_children", lambda: [child])
    assert [_title_of(pid) for pid in range(1, 6)] == [
        "gone",
        "x" * 119,
        f"{'x' * 120}…",
        "a fork of this rank",
        "multiprocessing's Bob",
    ]


def test_memory_is_given_back_where_a_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trimmed = {"resident": 1000}, list[int]()
    monkeypatch.setattr(FreedMemory, "_resident", lambda self: now["resident"])
    freed = FreedMemory()
    monkeypatch.setattr(freed, "_trim", trimmed.append)
    monkeypatch.setattr(leaks, "gc", SimpleNamespace(collect=lambda: None))
    grown = 1000 + leaks.GROWTH
    for resident, times in ((grown, 0), (grown + 1, 1), (grown + 1, 1), (2 * grown + 2, 2)):
        now["resident"] = resident
        freed.pytest_ranks_finished()
        assert trimmed == [0] * times
    monkeypatch.setattr(freed, "_trim", None)
    now["resident"] = 10 * grown
    freed.pytest_ranks_finished()


def test_the_memory_of_a_process_is_read_in_bytes_where_the_system_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed = FreedMemory()
    assert freed._figures is not None
    monkeypatch.setattr(leaks.os, "pread", lambda *_: b"700 30 5 1 0 2 0")
    assert freed._resident() == 30 * leaks.mmap.PAGESIZE
    os.close(freed._figures)
    freed._figures = None
    assert freed._resident() == 0
