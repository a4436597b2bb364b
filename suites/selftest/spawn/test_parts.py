"""Values that are sent to processes of tests, and the processes of a server, without a test."""

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

from lockstep.features.spawn import held
from lockstep.features.spawn import starter as starters
from lockstep.features.spawn.counts import Counts
from lockstep.features.spawn.held import held_by_modules
from lockstep.features.spawn.multiprocessing_internals import TooManyDescriptors
from lockstep.features.spawn.pickling import NotAlone, pickle_alone
from lockstep.features.spawn.process_state import differing_variable
from lockstep.features.spawn.starter import Started, Starter
from suites.selftest.spawn.test_calls import config_of


class Named:
    __module__ = "__main__"


def started() -> None:
    """Do nothing, in a process."""


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


def test_a_process_that_the_server_does_not_fork_is_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = SimpleNamespace(directory=str(tmp_path), key=None, environ=dict(os.environ))
    seen: list[Started] = []
    process, raised = get_context("spawn").Process(target=print), list[Exception]()

    def fork(process: object, method: str, starter: object) -> Any:
        if raised:
            raise raised.pop()
        return ("fork", process, method, starter)

    monkeypatch.setattr(starters, "ForkedPopen", fork)
    monkeypatch.setattr(starters, "start_new_interpreter", lambda process: ("new", process))
    starter = Starter(server, seen.append)
    assert starter.start(process, "spawn") == ("fork", process, "spawn", starter)
    for error in (ConnectionRefusedError("refused"), EOFError(), TooManyDescriptors("too many")):
        raised.append(error)
        assert starter.start(process, "spawn") == ("new", process)
    monkeypatch.setenv("PYTHONHASHSEED", "777")
    assert starter.start(process, "spawn") == ("new", process)
    changed = "PYTHONHASHSEED was changed, which a new interpreter reads as it starts"
    assert [each.why_not for each in seen] == ["", "refused", "the server has ended", "too many", changed]
    assert {each.target for each in seen} == {"`print`"}
    raised.append(ValueError("of the user's"))
    monkeypatch.delenv("PYTHONHASHSEED")
    monkeypatch.setattr(server, "environ", dict(os.environ))
    with pytest.raises(ValueError, match="of the user's"):
        starter.start(process, "spawn")
    assert len(seen) == 5


def test_a_process_gets_the_setup_of_the_one_that_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = SimpleNamespace(directory=str(tmp_path), key=None, environ={})
    starter, process = Starter(server, rewritten=lambda: ("m",)), get_context("spawn").Process()
    monkeypatch.setattr(starters.ProcessState, "capture", lambda: "state")
    setup = starter.setup("forkserver")
    assert (setup.state, setup.server, setup.parent) == ("state", server, os.getpid())  # type: ignore[comparison-overlap]
    assert (setup.method, setup.rewritten) == ("forkserver", ("m",))
    program = starter.program(process, "spawn")
    assert (program.process, program.method) == (process, "spawn")
    starter.began(5)
    assert list(tmp_path.iterdir()) == []
    before = starter.descriptors()
    monkeypatch.setattr(starters.os, "getpid", lambda: -1)
    of_fork = starter.descriptors()
    assert before[2] != of_fork[2]
    monkeypatch.undo()
    starter.close()
    for descriptor in (before[2], of_fork[2]):
        os.fstat(descriptor)
        os.close(descriptor)


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
