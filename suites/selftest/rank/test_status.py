"""The status of a rank, and stacks of threads that run while they are looked at."""

from __future__ import annotations

import os
import threading
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.flight_entries import DEFAULT_GROUP, FlightRecord
from lockstep.protocol import MEETING, BuildLock, Issued, Probe, Progress, RankStatus
from lockstep.rank import status as module
from lockstep.rank.flight_record import keep_stack
from lockstep.rank.status import Activity, Stacks, StatusReader, progress
from lockstep.rank.wire import WIRE_THREAD
from lockstep.tracebacks import StackFrame


def busy(stop: threading.Event) -> None:
    """Call, return, raise and yield as fast as it goes."""

    def deep(depth: int) -> int:
        return sum(deep(depth - 1) for _ in range(2)) if depth else len([*map(str, range(20))])

    while not stop.is_set():
        deep(8)


def test_stacks_of_running_threads_are_stacks() -> None:
    stop, stacks = threading.Event(), Stacks()
    thread = threading.Thread(target=busy, args=(stop,))
    thread.start()
    try:
        until = time.monotonic() + 1.0
        seen = set()
        while time.monotonic() < until:
            stack = stacks.take()[thread.ident or 0]
            assert stack[-1].function == "_bootstrap"  # each walk reaches the thread's beginning
            seen.add(stack[0].function)
    finally:
        stop.set()
        thread.join()
    assert "deep" in seen


def test_stacks_are_those_of_the_threads_of_now() -> None:
    stop, stacks = threading.Event(), Stacks()
    before = stacks.take().keys()
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
    assert stacks.take().keys() - before == {thread.ident}
    stop.set()
    thread.join()
    assert stacks.take().keys() == before


def test_a_place_is_a_line_of_a_function() -> None:
    place = Stacks().take()[threading.get_ident()][1]  # below `take`
    assert (place.file, place.function) == (__file__, "test_a_place_is_a_line_of_a_function")
    assert "Stacks().take()" in (place.summary().line or "")


# The answer to the controller

ISSUED = Issued(DEFAULT_GROUP, (0, 1), 4, "all_reduce", (), (), in_flight=True)
MEETS = Issued(MEETING, (), 1, "init_process_group", (), (), in_flight=True)
RECORD = FlightRecord((), {}, {}, 1, 2)
OF_PYTEST = "/site-packages/_pytest/python.py"
PACKAGE = "/site-packages/torch/a.py"


class Reader(StatusReader):
    """A reader in a process whose threads, calls and time are what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []
        self.ran = self.now = 10.0
        self.seen: object = 1
        self.threads: dict[int, Any] = {}
        self.children: list[int] = []
        monkeypatch.setattr(module, "issued_since", self.issued_since)
        monkeypatch.setattr(module, "read_record", lambda began, group: (RECORD, began, group))
        monkeypatch.setattr(module, "progress", lambda: self.seen)
        monkeypatch.setattr(module, "children_of", lambda pid: pid == os.getpid() and self.children)
        monkeypatch.setattr(module, "build_locks", lambda: (BuildLock("/lock", is_held=True),))
        clock = SimpleNamespace(monotonic=lambda: self.now, clock_gettime=self.clock_gettime)
        clock.pthread_getcpuclockid = lambda ident: ("clock of", ident)
        monkeypatch.setattr(module, "time", clock)
        group: Any = "the group"
        super().__init__(Activity("runs", "n=1", "1 of 2", "world.rebuild", 5), group, "/home")
        self.stacks = SimpleNamespace(take=lambda: dict(self.threads))
        monkeypatch.setattr(self, "_stacks", self.stacks)

    def issued_since(self, began: int, group: object) -> tuple[tuple[Issued, ...], dict[str, int]]:
        assert group == "the group"
        self.began.append(began)
        return (ISSUED,), {DEFAULT_GROUP: 3}

    def clock_gettime(self, clock: object) -> float:
        assert clock == ("clock of", threading.main_thread().ident)
        return self.ran

    def at(self, *frames: tuple[str, str], thread: int | None = None) -> None:
        """Put a thread, the main one if not said otherwise, into these functions, outermost first."""
        ident = threading.main_thread().ident if thread is None else thread
        assert ident is not None
        self.threads[ident] = tuple(
            StackFrame(file, number, name) for number, (file, name) in reversed([*enumerate(frames, 1)])
        )

    def status(self) -> RankStatus:
        found = self.answer(Probe(full=True))
        assert isinstance(found, RankStatus)
        return found


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    made = Reader(monkeypatch)
    made.at((OF_PYTEST, "call"), ("/home/a.py", "test_a"), (PACKAGE, "recv"))
    return made


PLAIN = RankStatus("", "", issued=(ISSUED,), before={DEFAULT_GROUP: 3}, case="n=1", count="1 of 2")


def test_the_collectives_of_a_rank_come_with_what_it_is_in(reader: Reader) -> None:
    assert reader.collectives() == PLAIN
    assert reader.began == [5]
    reader.activity.meeting = MEETS
    reader.activity.state = "votes"
    reader.add_part("mine", lambda: {"a": 1})
    reader.add_part("empty", dict)
    expected = replace(PLAIN, call="world.rebuild", issued=(MEETS, ISSUED), state="votes")
    assert reader.collectives() == replace(expected, parts={"mine": {"a": 1}})


def test_a_whole_status_has_stacks_locks_and_the_record(reader: Reader) -> None:
    status = reader.status()
    assert status.stacks.splitlines()[:2] == ["MainThread:", '  File "/home/a.py", line 2, in test_a']
    record: Any = (RECORD, 5, "the group")
    locks = (BuildLock("/lock", is_held=True),)
    expected = replace(PLAIN, where="a.py:2 in test_a", call="recv", build_locks=locks, record=record)
    assert replace(status, stacks="") == expected
    reader.activity.state = "votes"
    assert reader.status().call == "world.rebuild"


def test_a_rank_that_gets_on_says_no_more(reader: Reader) -> None:
    assert reader.answer(Probe()) == Progress("1 of 2")
    reader.seen = 2
    assert reader.answer(Probe()) == Progress("1 of 2")


def test_a_rank_that_is_blocked_says_so_and_since_when(reader: Reader) -> None:
    reader.answer(Probe())
    reader.now = 12.5
    status = reader.answer(Probe())
    assert isinstance(status, RankStatus)
    assert (status.where, status.blocked) == ("a.py:2 in test_a", 2.5)
    assert (status.build_locks, status.record) == ((), None)
    reader.now = 13.0
    assert reader.status().blocked == 3.0
    reader.seen = 2
    assert reader.status().blocked == 0.0


def test_a_rank_is_not_known_to_be_blocked_at_first(reader: Reader) -> None:
    reader.seen = None
    assert reader.status().blocked == 0.0


def test_a_rank_that_does_not_run_a_test_answers_without_stacks(reader: Reader) -> None:
    for state in ("votes", "idle"):
        reader.activity.state = state  # type: ignore[assignment]
        answer = reader.answer(Probe())
        assert isinstance(answer, RankStatus)
        assert (answer.state, answer.stacks) == (state, "")
        assert reader.status().stacks


def test_another_thread_with_code_of_the_user_may_free_a_rank(reader: Reader) -> None:
    reader.answer(Probe())
    reader.at(("/home/a.py", "g"), thread=77)
    assert reader.answer(Probe()) == Progress("1 of 2")
    reader.at((PACKAGE, "g"), thread=77)
    assert isinstance(reader.answer(Probe()), RankStatus)
    del reader.threads[77]
    assert isinstance(reader.answer(Probe()), RankStatus)


def test_the_thread_that_answers_frees_no_rank(reader: Reader) -> None:
    answers: list[object] = []

    def answer() -> None:
        reader.at(("/home/a.py", "f"), thread=threading.get_ident())
        answers.extend(reader.answer(Probe()) for _ in range(2))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join()
    assert isinstance(answers[1], RankStatus)


def test_a_rank_that_meets_others_waits_unless_it_has_children(reader: Reader) -> None:
    reader.activity.meeting = MEETS
    reader.answer(Probe())
    reader.seen = 2
    assert isinstance(reader.answer(Probe()), RankStatus)
    reader.children = [9]
    assert isinstance(reader.answer(Probe()), Progress)
    reader.seen = 3
    assert isinstance(reader.answer(Probe()), Progress)
    reader.children = []
    reader.activity.meeting = replace(MEETS, in_flight=False)
    reader.answer(Probe())
    reader.seen = 4
    assert isinstance(reader.answer(Probe()), Progress)


def test_progress_names_the_place_on_request(reader: Reader) -> None:
    probe = Probe(names_place=True)
    assert reader.answer(probe) == Progress("1 of 2", "a.py:2 in test_a", "recv", computes=True)
    for ran, now, computes in ((10.5, 11.0, False), (11.1, 12.0, True), (11.5, 13.0, False)):
        reader.ran, reader.now, reader.seen = ran, now, now
        expected = Progress("1 of 2", "a.py:2 in test_a", "recv", computes=computes)
        assert reader.answer(probe) == expected
    reader.threads.clear()
    reader.seen = 0
    answer = reader.answer(probe)
    assert isinstance(answer, Progress)
    assert (answer.where, answer.call) == ("?", "")


def test_a_status_that_cannot_be_read_is_the_error(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("not documented")

    monkeypatch.setattr(module, "issued_since", fail)
    status = reader.status()
    assert "KeyError: 'not documented'" in status.stacks
    assert replace(status, stacks="") == RankStatus("", "an unknown place", state="runs")


def test_other_threads_are_named_but_for_that_of_the_wire(reader: Reader) -> None:
    stop = threading.Event()
    named, wire = (
        threading.Thread(target=stop.wait, name=name, daemon=True) for name in ("worker", WIRE_THREAD)
    )
    named.start()
    wire.start()
    try:
        for number, ident in enumerate((named.ident, wire.ident, 77)):
            reader.at((PACKAGE, f"f{number}"), thread=ident)
        stacks = reader.status().stacks
    finally:
        stop.set()
        named.join()
        wire.join()
    assert [line for line in stacks.splitlines() if line.endswith(":")] == ["MainThread:", "worker:", "77:"]
    assert "line 1, in f0\n" in stacks
    assert "f1" not in stacks
    assert stacks.count("\n\n") == 2


def test_a_call_has_the_name_that_a_feature_gives_it(reader: Reader) -> None:
    reader.name_call("waits", "a debugger")
    assert reader.status().call == "recv"
    reader.at((PACKAGE, "waits"), thread=77)
    assert reader.status().call == "a debugger"


@pytest.mark.parametrize(
    ("frames", "names", "state"),
    [
        (((OF_PYTEST, "p"), ("/home/a.py", "f"), (PACKAGE, "g")), "fg", "runs"),
        (((OF_PYTEST, "p"), ("/site-packages/pluggy/b.py", "q"), (PACKAGE, "g")), "qg", "reports"),
        (((OF_PYTEST, "p"), ("/hidden/a.py", "h"), ("/home/a.py", "f")), "f", "runs"),
        (((OF_PYTEST, "p"), ("/hidden/a.py", "h"), (PACKAGE, "g")), "phg", "reports"),
        (((OF_PYTEST, "p"), ("/runner/a.py", "r"), ("/home/a.py", "f")), "f", "runs"),
        (((PACKAGE, "g"),), "g", "runs"),
        (((PACKAGE, "g"), (PACKAGE, "h")), "gh", "runs"),
        ((("/home/a.py", "f"), (OF_PYTEST, "p")), "p", "reports"),
        ((), "", "runs"),
    ],
)
def test_a_stack_begins_below_pytest_or_with_it(
    reader: Reader, frames: tuple[tuple[str, str], ...], names: str, state: str
) -> None:
    pluggy_folder = str(module.pluggy.__path__[0])
    frames = tuple((file.replace("/site-packages/pluggy", pluggy_folder), name) for file, name in frames)
    reader.hide_frames("/else/")
    reader.hide_frames("/hidden/")
    reader.count_as_pytest("/runner/")
    reader.at(*frames)
    status = reader.status()
    found = [line.rpartition(" in ")[2] for line in status.stacks.splitlines() if " in " in line]
    assert "".join(found) == names
    assert status.state == state


def frames_of(*frames: tuple[str, str]) -> list[traceback.FrameSummary]:
    return [StackFrame(file, 3, name).summary() for file, name in frames]


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ((("/a.py", "f"), ("/b.py", "g")), ("/b.py:3 in g", "")),
        ((("/a.py", "f"), (PACKAGE, "recv"), (PACKAGE, "inner")), ("/a.py:3 in f", "recv")),
        ((("/a.py", "f"), (PACKAGE, "wrapper"), (PACKAGE, "recv")), ("/a.py:3 in f", "recv")),
        (((PACKAGE, "f"), (PACKAGE, "g")), (f"{PACKAGE}:3 in g", "")),
        ((), ("?", "")),
    ],
)
def test_the_line_of_the_user_is_the_innermost(
    frames: tuple[tuple[str, str], ...], line: tuple[str, str]
) -> None:
    assert module._user_line(frames_of(*frames)) == line


def test_stacks_of_calls_are_kept_once_a_backend_is_loaded(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([False, False, True])
    observed: list[object] = []
    backend = SimpleNamespace(observe=lambda observer: observed.append(observer) or next(answers))
    other = SimpleNamespace(observe=lambda observer: False)
    monkeypatch.setattr(module, "BACKENDS", {"a": backend, "b": other})
    for _ in range(5):
        reader.keep_stacks()
    assert observed == [keep_stack] * 3


# Progress of the main thread


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Files in which the system shows the main thread; no backend waits."""
    found = {"/proc/self/wchan": "futex", f"/proc/self/task/{os.getpid()}/schedstat": "1 2 3"}

    class Shown:
        def __init__(self, path: str) -> None:
            self.path = path

        def read_text(self) -> str:
            if self.path not in found:
                raise FileNotFoundError(self.path)
            return found[self.path]

    monkeypatch.setattr(module, "Path", Shown)
    monkeypatch.setattr(module, "BACKENDS", {"a": SimpleNamespace(wait_of=lambda thread: None)})
    return found


def test_progress_is_the_time_that_the_main_thread_has_run(files: dict[str, str]) -> None:
    assert progress() == progress() == "1 2 3"
    del files["/proc/self/wchan"]
    assert progress() == "1 2 3"


def test_a_main_thread_that_sleeps_or_is_not_seen_gets_on(files: dict[str, str]) -> None:
    files["/proc/self/wchan"] = "hrtimer_nanosleep"
    assert progress() != progress()
    files.clear()
    assert progress() != progress()


def test_a_wait_that_wakes_up_by_itself_is_progress_of_its_own(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = SimpleNamespace(wait_of=lambda thread: thread is threading.main_thread() and ("barrier", 3))
    none = SimpleNamespace(wait_of=lambda thread: None)
    monkeypatch.setattr(module, "BACKENDS", {"a": none, "b": waits})
    assert progress() == ("barrier", 3)
