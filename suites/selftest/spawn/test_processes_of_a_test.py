"""The processes of a test, without one: those that are left, and what is said of them."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.exceptions import RankLeakWarning
from lockstep.features.spawn import hang, processes
from lockstep.features.spawn.deadline import LOOK_EVERY
from lockstep.features.spawn.failure import failure_path, stacks_path
from lockstep.features.spawn.processes import TestProcesses
from lockstep.features.spawn.starter import Started
from lockstep.protocol import Finished, RankStatus
from lockstep.world.outcome import Died, ItemOutcome, RankOutcome, Stuck
from suites.selftest.spawn.test_calls import config_of, item_of

# The processes of a test


def started(pid: int, alive: bool = False, code: int | None = 0, target: str = "`f`") -> Any:
    process = SimpleNamespace(
        pid=pid, name=f"P-{pid}", is_alive=lambda: alive, join=lambda seconds: None, code=code
    )
    return Started(process, target, None)  # type: ignore[arg-type]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processes of a test: none of them is real, and what is ended is noted."""
    ended: list[set[int]] = []
    monkeypatch.setattr(processes, "end", lambda pids, within: ended.append(pids()))
    monkeypatch.setattr(processes, "is_running", lambda pid: True)
    monkeypatch.setattr(processes, "exit_code_of", lambda process: process.code)
    monkeypatch.setattr(processes, "is_unseen", lambda process: process.name != "seen")
    monkeypatch.setattr(processes, "end_pools", lambda: ended.append({0}))
    found = TestProcesses(config_of())
    vars(found)["ended"] = ended
    return found


def test_a_test_that_leaves_processes_behind_is_warned(tested: Any) -> None:
    item = item_of()
    tested.begin(item)
    for each in (started(11, alive=True), started(12, code=3), started(13), started(14, code=None)):
        tested.add(each)
    tested._hung = {15}
    tested.add(started(15, code=-9))
    tested._look(item)
    (warned,) = item.warned
    assert isinstance(warned, RankLeakWarning)
    assert str(warned) == (
        "the test left behind process 11 (P-11, `f`), which was running and was ended; "
        "process 12 (P-12, `f`), which exited with code 3; the test did not ask for that"
    )
    assert tested.ended == [{11}]


def test_a_test_that_leaves_nothing_is_not_warned(tested: Any) -> None:
    item = item_of()
    tested.begin(item)
    tested._look(item)
    tested.add(started(13))
    tested._look(item)
    assert (item.warned, tested.ended) == ([], [])


@pytest.mark.parametrize("policy", ["off", "error"])
def test_the_policy_of_leaks_holds_for_processes(tested: Any, policy: str) -> None:
    item = item_of()
    tested._config = config_of(ranks_leaks=policy)
    tested.begin(item)
    tested.add(started(11, alive=True))
    if policy == "off":
        tested._look(item)
    else:
        said = r"the test left behind process 11 \(.*was ended \(ranks_leaks = error\)$"
        with pytest.raises(pytest.fail.Exception, match=said):
            tested._look(item)
    assert (item.warned, tested.ended) == ([], [{11}])


def test_processes_of_wide_fixtures_outlive_the_test(tested: Any) -> None:
    wide, narrow = (SimpleNamespace(scope=scope) for scope in ("module", "function"))
    for definition, pid in ((wide, 21), (narrow, 22)):
        setup = tested.pytest_fixture_setup(definition)
        next(setup)
        tested.add(started(pid, alive=True))
        with pytest.raises(StopIteration):
            next(setup)
    tested.add(started(23, alive=True))
    tested._of_fixtures.append(started(24))
    assert tested.pids() == {21, 22, 23}
    tested._hung = {22}
    tested.begin(item_of())
    assert ([each.process.pid for each in tested._of_fixtures], tested._of_item) == ([21], [])
    assert tested._hung == set()
    assert tested.end_all() == [
        "the session left behind process 21 (P-21, `f`), which was running and was ended"
    ]
    assert tested.ended == [{0}, {21}]
    tested._of_fixtures.clear()
    assert (tested.end_all(), tested.ended) == ([], [{0}, {21}])


def test_what_cannot_be_asked_is_not_alive(tested: Any) -> None:
    def closed() -> bool:
        raise ValueError("process object is closed")

    process: Any = SimpleNamespace(is_alive=closed)
    assert not processes._is_alive(Started(process, "", None))


def test_a_process_that_does_not_end_fails_those_of_its_function(
    tested: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.connection, "wait", lambda sentinels, within: [])
    tested._config, tested.directory = config_of(timeout=1e-6), str(tmp_path)
    tested.await_process(11, 1)  # no item runs
    tested.begin(item_of())
    everything = [started(14, True, 0, "`g`"), started(11, alive=True), started(12, alive=True), started(13)]
    for each in everything:
        tested.add(each)
    with pytest.raises(pytest.fail.Exception) as failed:
        tested.await_process(11, 1)
    lines = [line for line in str(failed.value).splitlines() if line]
    assert lines == [f"process {pid} (P-{pid}, `f`) has not ended within 0 s" for pid in (11, 12)]
    assert (tested.ended, tested._hung) == ([{11, 12}], {11, 12})
    monkeypatch.setattr(processes.connection, "wait", lambda sentinels, within: sentinels)
    tested.await_process(11, 1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", "code that is not the test's"),
        ('  File "/x/spawn.py", line 1 in _wrap', "the report of its own failure"),
    ],
)
def test_a_process_without_a_line_of_the_test_is_placed(
    tested: Any, tmp_path: Path, text: str, place: str
) -> None:
    tested._config.invocation_params = SimpleNamespace(dir=tmp_path)
    tested.directory = str(tmp_path)
    (tmp_path / "spawned").mkdir()
    if text:
        (tmp_path / "spawned" / "5.stacks").write_text(text)
    assert tested._status_of(5).where == place


@pytest.fixture
def recorded(tested: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, with a directory in which processes leave files, at a time that stands still."""
    tested.directory = str(tmp_path)
    for name in ("spawned", "ranks"):
        (tmp_path / name).mkdir()
    clock = SimpleNamespace(time=lambda: 9.0, monotonic=lambda: 7.0)
    monkeypatch.setattr(processes, "time", clock)
    sent = {"pytest_report_to_serializable": lambda config, report: (report.when, report.outcome)}
    tested._config.hook, tested._config.invocation_params = SimpleNamespace(**sent), SimpleNamespace(dir="/x")
    return tested


def test_files_and_exit_codes_say_how_processes_ended(recorded: Any, tmp_path: Path) -> None:
    item, setup = item_of(), ("setup", "passed")
    item.nodeid, item.location, item.keywords = "a.py::test", ("a.py", 3, "test"), {}
    for pid in (1, 3):
        failure_path(str(tmp_path), pid).write_bytes(
            pickle.dumps({"nodeid": "", "location": "", "longrepr": 1})
        )
    stacks_path(str(tmp_path), 6).write_text("stacks")
    recorded._hung = {1}
    given = [(1, -9, 4), (3, 1, 4), (4, 0, 7), (6, -15, 4), (6, -15, 6), (7, 3, 4)]
    found = [
        recorded._outcome(item, 2, started(pid, code=code).process, failed) for pid, code, failed in given
    ]
    of_item = {"nodeid": "a.py::test", "location": ("a.py", 3, "test"), "longrepr": 1}
    nowhere, ended = "code that is not the test's", Finished(True, 0, 0)
    assert found == [
        RankOutcome(2, [setup], fate=Stuck(RankStatus("", nowhere, ""), 9.0, phases_over=1)),
        RankOutcome(2, [setup, of_item], fate=ended),
        RankOutcome(2, [setup], fate=ended),
        RankOutcome(2, [setup], fate=Stuck(RankStatus("stacks", nowhere, ""), 9.0, phases_over=1)),
        RankOutcome(2, [setup], fate=Died(-15, "", 9.0, phases_over=1)),
        RankOutcome(2, [setup], fate=Died(3, "", 9.0, phases_over=1)),
    ]


def of_call(pid: int, index: int | None, **given: Any) -> Started:
    """Return a process of a call of `spawn`."""
    return replace(started(pid, **given), index=index)


def test_processes_of_a_failed_call_have_one_report(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[Any] = []
    failed: Any = SimpleNamespace(failed=True)

    def merge(outcome: ItemOutcome, *given: Any) -> list[Any]:
        merged.extend([outcome, *given])
        return [SimpleNamespace(failed=False), failed]

    monkeypatch.setattr(processes, "merge", merge)
    monkeypatch.setattr(processes, "rerun_line", lambda item: ("again", item))
    monkeypatch.setattr(TestProcesses, "_outcome", lambda self, *given: given)
    recorded._config.getoption = {"world_seed": 5}.get
    item = item_of()
    recorded._began = 4.5
    for each in (of_call(11, 0), of_call(12, 1), started(13)):
        recorded.add(each)
    assert recorded.report_of(item, 12) is failed
    outcome, of, rerun, seed = merged
    assert [(given[0], *given[1:2], given[2].pid, given[3]) for given in outcome.ranks] == [
        (item, 0, 11, 12),
        (item, 1, 12, 12),
    ]
    assert (outcome.timeout, outcome.timed_out, outcome.seconds) == (2.5, False, 2.5)
    assert (of, rerun(), seed) == (item, ("again", item), 5)
    assert recorded.report_of(item, 13) is None
    recorded.directory = ""
    assert recorded.report_of(item, 12) is None


def test_a_call_that_hangs_fails_with_the_report_of_its_processes(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged: list[ItemOutcome] = []
    report = SimpleNamespace(failed=True, longreprtext="they hang\nmore")

    def merge(outcome: ItemOutcome, *given: Any) -> list[Any]:
        merged.append(outcome)
        return [report]

    monkeypatch.setattr(processes, "merge", merge)
    monkeypatch.setattr(processes, "start_method_of", lambda process: process.method)
    monkeypatch.setattr(TestProcesses, "_wait", lambda self, sentinels: waits[tuple(sentinels)])
    statuses = {11: RankStatus("", "a.py:1 in f", call="all_reduce"), 12: RankStatus("", "b.py:2 in g")}
    monkeypatch.setattr(TestProcesses, "_status_of", lambda self, pid: statuses[pid])
    recorded._config.getoption = {"world_seed": 5}.get
    item = item_of()
    item.nodeid, item.location, item.keywords = "a.py::test", ("a.py", 3, "test"), {}
    recorded._item = item
    joined: list[float] = []
    hung = [started(pid, alive=pid < 13).process for pid in (11, 12, 13)]
    for each in hung:
        vars(each).update(method="spawn", join=joined.append)
    waits = {(1,): 0.0, (2,): 61.26}
    recorded.await_context(SimpleNamespace(processes=hung, sentinels=(1,)))
    of_fork = SimpleNamespace(**{**vars(hung[0]), "method": "fork"})
    recorded.await_context(SimpleNamespace(processes=[*hung, of_fork], sentinels=(2,)))
    assert (merged, recorded._hung) == ([], set())
    with pytest.raises(pytest.fail.Exception, match=r"\Athey hang\Z") as failed:
        recorded.await_context(SimpleNamespace(processes=hung, sentinels=(2,)))
    assert vars(failed.value)[hang.REPORT] is report
    assert (recorded._hung, recorded.ended, joined) == ({11, 12}, [{11, 12}], [processes.STACKS_WITHIN] * 3)
    (outcome,) = merged
    assert (outcome.timeout, outcome.timed_out, outcome.seconds) == (61.3, True, 61.26)
    assert [(rank.rank, type(rank.fate)) for rank in outcome.ranks] == [(0, Stuck), (1, Stuck), (2, Finished)]
    assert outcome.diagnosis is not None
    assert (outcome.diagnosis.blame, outcome.parts) == ({1}, {"spawn": {}})


def test_only_the_thread_of_tests_waits_with_a_deadline(tested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[int]] = [[], [], [5]]
    asked: list[Any] = []
    deadline = SimpleNamespace(moment=lambda: processes.time.monotonic() + 1, seconds=lambda: 8.0)
    monkeypatch.setattr(processes, "Deadline", lambda limits, pids: deadline)
    monkeypatch.setattr(processes.connection, "wait", lambda *given: (asked.append(given), answers.pop(0))[1])
    assert (tested._wait([5]), asked) == (0, [])
    tested.begin(item_of())
    tested._controller += 1
    assert (tested._wait([5]), asked) == (0, [])
    tested._controller -= 1
    thread = threading.Thread(target=lambda: asked.append(tested._wait([5])), daemon=True)
    thread.start()
    thread.join()
    assert asked.pop() == 0
    assert (tested._wait([5]), asked) == (0, [([5], LOOK_EVERY)] * 3)
    deadline.moment = lambda: -1.0
    answers.append([])
    assert tested._wait([5]) == 8.0


def test_a_process_of_a_thread_that_was_there_before_is_of_no_test(tested: Any) -> None:
    ready, done = threading.Event(), threading.Event()

    def replace_a_process() -> None:
        done.wait()
        tested.add(started(41, alive=True))
        ready.set()

    thread = threading.Thread(target=replace_a_process, daemon=True)
    thread.start()
    tested.begin(item_of())
    done.set()
    ready.wait()
    thread.join()
    tested.add(started(42))
    assert [each.process.pid for each in tested._of_fixtures] == [41]
    assert [each.process.pid for each in tested._of_item] == [42]


def test_processes_that_a_module_holds_are_left_to_later_tests(
    tested: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_one, other, ended = started(51, alive=True), started(52, alive=True), started(53)
    asked: list[list[int]] = []

    def held_by(given: Any) -> set[int]:
        asked.append([each.pid for each in given])
        return {id(held_one.process)}

    monkeypatch.setattr(processes, "held_by_modules", held_by)
    item = item_of()
    tested.begin(item)
    for each in (held_one, other, ended):
        tested.add(each)
    tested._look(item)
    assert (asked, tested.ended) == ([[51, 52]], [{52}])
    assert [each.process.pid for each in tested._of_fixtures] == [51]
    assert "process 51" not in str(item.warned[0])


def test_what_processes_of_a_test_have_left_is_ended(
    recorded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, gone = os.getpid(), 1 << 23  # this one, and numbers that no process has
    command = " ".join(Path("/proc/self/cmdline").read_text().split("\0")[:-1])
    below = {8000031, 8000032, mine, gone}
    monkeypatch.setattr(processes, "server_pid", lambda: 77)
    monkeypatch.setattr(processes, "children_of", lambda pid: below if pid == 77 else set())
    monkeypatch.setattr(processes, "is_running", lambda pid: pid != 8000033)
    for pid in (8000031, 8000032, 8000033):
        (tmp_path / "ranks" / str(pid)).touch()
    for name in ("8000032.stacks", "8000033.stacks", "8000033.failure"):
        (tmp_path / "spawned" / name).touch()
    item = item_of()
    assert recorded.pids() == {8000032}
    recorded.add(started(8000031, alive=True))
    assert recorded.pids() == {8000031, 8000032}
    recorded._look(item)
    (warned,) = item.warned
    assert str(warned) == "the test left behind " + "; ".join(
        [
            "process 8000031 (P-8000031, `f`), which was running and was ended",
            f"process {mine} ({command[:60]}), which was ended",
            "process 8000032 (started by a process of the test), which was ended",
            f"process {gone} (ended), which was ended",
        ]
    )
    assert recorded.ended == [{8000031, 8000032, mine, gone}]
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["8000031", "8000032", "8000032.stacks"]
    recorded._of_item = []
    recorded._look(item)  # of the ranks of a test
    assert "process 8000032 (started by" in str(item.warned[1])
    recorded._of_fixtures = [started(8000034, alive=True)]
    assert recorded._strays() == set()
    recorded._look(item)
    assert len(item.warned) == 2
    recorded._of_fixtures = []
    monkeypatch.setattr(processes, "server_pid", lambda: None)
    assert recorded._strays() == set()
    monkeypatch.setattr(processes, "server_pid", lambda: 77)
    recorded.directory = str(tmp_path / "removed")
    assert recorded._strays() == set()


def test_a_test_is_looked_at_after_its_tear_down(tested: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    monkeypatch.setattr(TestProcesses, "_look", lambda self, item: looked.append(item))
    item = item_of()
    teardown = tested.pytest_runtest_teardown(item)
    next(teardown)
    assert looked == []
    with pytest.raises(StopIteration) as end:
        teardown.send("result")
    assert (end.value.value, looked) == ("result", [item])


def test_waits_of_some_processes_are_laid_at_the_others() -> None:
    waits, runs = RankStatus("", "a.py:1 in f", call="all_reduce"), RankStatus("", "b.py:2 in g")
    one = hang.diagnose({0: waits, 1: runs})
    assert one is not None
    assert one.sentence == "rank 0 waits in all_reduce at a.py:1 in f, and rank 1 is at b.py:2 in g"
    assert (one.blame, one.is_hopeless) == ({1}, False)
    more = hang.diagnose({0: waits, 1: waits, 2: runs, 3: runs})
    assert more is not None
    assert more.sentence == (
        "ranks 0, 1 wait in all_reduce at a.py:1 in f, and ranks 2, 3 are at b.py:2 in g"
    )
    assert hang.diagnose({0: waits}) is hang.diagnose({0: runs}) is None
