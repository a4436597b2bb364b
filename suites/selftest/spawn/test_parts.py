"""The processes of tests, without one: what is sent to them, and what is said of those that are left."""

from __future__ import annotations

import os
import re
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.exceptions import RankLeakWarning
from lockstep.features.spawn import hang, held, processes
from lockstep.features.spawn.counts import Counts
from lockstep.features.spawn.held import held_by_modules
from lockstep.features.spawn.pickling import NotAlone, pickle_alone
from lockstep.features.spawn.process_state import differing_variable
from lockstep.features.spawn.processes import TestProcesses
from lockstep.features.spawn.starter import Started, Starter
from lockstep.protocol import RankStatus
from suites.selftest.spawn.test_calls import config_of, item_of


class Named:
    __module__ = "__main__"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Named, "Named is defined in __main__"),
        (torch.zeros(1), "an argument is shared: a Tensor"),
        (threading.Lock(), "an argument cannot be sent to a running process: cannot pickle"),
    ],
)
def test_a_value_that_needs_its_owner_is_not_sent(value: object, why: str) -> None:
    with pytest.raises(NotAlone, match=f"^{re.escape(why)}"):
        pickle_alone([value])


def test_processes_that_globals_of_users_lead_to_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        def __init__(self, *processes: Any) -> None:
            self.processes = processes

    names = ("direct", "in_pool", "in_dict", "too_deep", "installed", "free", "of_module")
    made = {name: get_context("spawn").Process() for name in names}
    mine, theirs, inner = ModuleType("mine"), ModuleType("theirs"), ModuleType("inner")
    mine.__file__, theirs.__file__ = __file__, pytest.__file__
    inner.process = made["of_module"]  # type: ignore[attr-defined]
    vars(mine).update(
        direct=made["direct"],
        pool=Pool(made["in_pool"]),
        by={"x": {made["in_dict"]}},
        deep=[[[[made["too_deep"]]]]],
        inner=inner,
    )
    theirs.process = made["installed"]  # type: ignore[attr-defined]
    # Of those alone: how many objects it looks at is limited, and a long run has imported many modules.
    monkeypatch.setattr(held, "sys", SimpleNamespace(modules={"mine": mine, "theirs": theirs}))
    found = held_by_modules(made.values())
    assert {name for name, each in made.items() if id(each) in found} == {"direct", "in_pool", "in_dict"}
    monkeypatch.setattr(held, "MAX_LOOKS", 0)
    assert held_by_modules(made.values()) == set()


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
    everything = [started(11, alive=True), started(12, alive=True), started(13), started(14, True, 0, "`g`")]
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


# The server's processes


def test_a_process_is_named_after_its_function() -> None:
    context, code = get_context("spawn"), sys.modules["torch.multiprocessing.spawn"]._wrap
    of_spawn = context.Process(target=code, args=(started, 3, (), None))
    found = [
        Started.of(each, "why")
        for each in (context.Process(target=started), context.Process(target=Named()), of_spawn)  # type: ignore[arg-type]
    ]
    assert [(each.target, each.index, each.why_not) for each in found] == [
        ("`started`", None, "why"),
        ("`Named`", None, "why"),
        ("`started`", 3, "why"),
    ]
    assert Started.of(context.Process()).target == "`run`"


def test_the_pipe_of_a_starter_ends_with_it(tmp_path: Path) -> None:
    server: Any = SimpleNamespace(directory=str(tmp_path), key=b"key", environ={})
    starter = Starter(server)
    out, err, end = starter.descriptors()
    assert ((out, err), starter.descriptors(), starter.key) == ((1, 2), [1, 2, end], b"key")
    begin = starter._lifeline[1] if starter._lifeline is not None else -1
    starter.close()
    for descriptor in (begin, end):
        with pytest.raises(OSError):
            os.fstat(descriptor)
    starter.close()
    (tmp_path / "ranks").mkdir()
    starter.began(5)
    assert (tmp_path / "ranks" / "5").exists()
    for _ in range(2):
        starter.ended(5, 0)
    assert not (tmp_path / "ranks" / "5").exists()


def test_new_interpreters_only_read_what_was_changed() -> None:
    assert differing_variable({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "1"}) == ""
    assert differing_variable({}, {"PYTHONHASHSEED": "1"}) == "PYTHONHASHSEED"


def test_counts_of_workers_are_added_up_and_shown() -> None:
    written: list[str] = []
    terminal: Any = SimpleNamespace(
        write_line=written.append, section=lambda title, sep: written.append(sep + title)
    )
    worker = Counts(SimpleNamespace(workerinput={}, workeroutput={}), lambda: ["left"])  # type: ignore[arg-type]
    worker.add("on warm ranks", "")
    worker.add("from the server", "")
    worker.add("in new interpreters", "why")
    worker.add("in new interpreters", "why")
    worker.pytest_sessionfinish()
    main = Counts(config_of(), list)
    main.pytest_terminal_summary(terminal)
    assert written == []
    main.add("on warm ranks", "")
    main.pytest_testnodedown(SimpleNamespace())
    main.pytest_testnodedown(SimpleNamespace(workeroutput=worker._config.workeroutput))  # type: ignore[attr-defined]
    main.pytest_sessionfinish()
    main.pytest_terminal_summary(terminal)
    assert written == [
        "ranks_adopt: left",
        "-adopted processes",
        "1 process from the server",
        "2 processes in new interpreters: why",
        "2 calls of spawn on warm ranks",
    ]
