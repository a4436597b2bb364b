"""Starts of worlds: options, the server, ranks that are forked or spawned, and what prevents a start."""

from __future__ import annotations

import errno
import getpass
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.exceptions import LaunchError
from lockstep.launch import processes, server
from lockstep.launch.processes import ProcessLauncher, RankProgram
from suites.selftest.project import HEADER

if TYPE_CHECKING:
    from lockstep.specification import RankSpec
    from suites.selftest.project import Project

CHANGING = (
    *("-o", "console_output_style=classic", "--fresh-worlds", "--world-seed=7", "--world-timeout=0.01"),
    *("-c", "pytest.ini", "--mine=a b", "-vk", "test_a", "--flag", "--tb=short", "--several", "x", "y"),
    *("-n0", "-vs", "-W", "error::EncodingWarning", "--runxfail", "--subtest", "a=1"),
)


@pytest.fixture(scope="module")
def changed(shared_project: Project) -> str:
    """Output of a run with every option that changes one, in a temporary directory too deep for sockets."""
    shared_project.copy("starting", "ranks_preload = heavy\npythonpath = .")
    deep = shared_project.path / "tmp" / ("deep" * 20)
    deep.mkdir(parents=True)
    shared_project.plugins = True
    return shared_project.run("test_sample.py", *CHANGING, tmpdir=deep)


def test_the_re_run_line_repeats_options_that_change_a_run(changed: str) -> None:
    line = next(line for line in changed.splitlines() if line.startswith("pytest test_sample"))
    assert line == (
        "pytest test_sample.py::test_a_failure -c pytest.ini -o console_output_style=classic "
        "-p no:cacheprovider --world-seed 7 --world-timeout 0.01 --fresh-worlds --capture no --runxfail "
        "'--mine=a b' --flag --several x y -W error::EncodingWarning --subtest a=1"
    )


def test_fresh_worlds_gives_every_test_new_processes(changed: str, shared_project: Project) -> None:
    assert "1 failed, 3 passed, 1 deselected" in changed
    assert len(set(shared_project.pids("pids"))) == 2


HAVE = """
import sys

def pytest_sessionstart(session):
    with open("have.txt", "a") as file:
        print("torch.distributed.tensor" in sys.modules, file=file)
"""
WORLD = "def test_a(world):\n    pass\n"


@pytest.mark.parametrize(
    ("imports", "have"),
    [
        ("", [False, False, False]),
        ("import torch.distributed.tensor", [False, True, True]),
        ("import own", [False, True, True]),
    ],
    ids=["none", "named", "by-another"],
)
def test_what_takes_long_is_imported_once_for_all_if_at_all(
    project: Project, imports: str, have: list[bool]
) -> None:
    project.write(f"{imports}\n{WORLD}", "pythonpath = .")
    (project.path / "own.py").write_text("import torch.distributed.tensor\n")
    (project.path / "conftest.py").write_text(HAVE)
    assert "1 passed" in project.run()
    # The controller, and two ranks before they collect.
    assert (project.path / "have.txt").read_text().split() == list(map(str, have))


COMPILES = "def test_c(world):\n    torch.compile(torch.nn.Linear(2, 2), backend='eager')(torch.ones(2))\n"
TRAINS = "def test_b(world):\n    torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).step()\n"


@pytest.mark.parametrize(
    ("first", "second", "module", "have"),
    [
        (WORLD, WORLD, "torch._dynamo", False),
        (TRAINS, WORLD, "torch._dynamo", True),
        (WORLD, TRAINS, "torch._dynamo", True),
        (TRAINS, TRAINS, "torch._dynamo.repro", False),
        (WORLD, COMPILES, "torch._dynamo.repro.after_dynamo", True),
    ],
    ids=["nowhere", "first", "second", "optimizers-alone", "compiled"],
)
def test_what_optimizers_and_compilers_import_is_imported_once_for_all(
    project: Project, first: str, second: str, module: str, have: bool
) -> None:
    project.write(f"import torch\n{first}")
    (project.path / "test_second.py").write_text(f"{HEADER}import torch\n{second}")
    (project.path / "conftest.py").write_text(HAVE.replace("torch.distributed.tensor", module))
    assert "2 passed" in project.run()
    assert (project.path / "have.txt").read_text().split() == ["False", str(have), str(have)]


def test_the_server_imports_nothing_of_the_project(project: Project) -> None:
    project.write(f"import harness.own\n{WORLD}", "pythonpath = .")
    (project.path / "harness").mkdir()
    (project.path / "harness" / "__init__.py").write_text("")
    own = project.path / "harness" / "own.py"
    own.write_text('import os\nopen("pids.txt", "a").write(f"{os.getpid()} ")\n')
    assert "1 passed" in project.run()
    # The controller and two ranks.
    assert len(set((project.path / "pids.txt").read_text().split())) == 3


def test_preloaded_modules_are_imported_once_and_no_others(changed: str) -> None:
    assert "test_sample.py::test_a_module PASSED" in changed


def test_a_temporary_directory_may_be_too_deep_for_sockets(changed: str, shared_project: Project) -> None:
    assert len(shared_project.pids("pids")) == 2
    (deep,) = (shared_project.path / "tmp").iterdir()
    assert list(deep.iterdir()) == [deep / f"pytest-of-{getpass.getuser()}"]


def test_the_deadline_of_a_test_excludes_the_start_of_ranks(changed: str, shared_project: Project) -> None:
    assert "--world-timeout 0.01" in changed
    assert len(shared_project.pids("pids")) == 2


def test_spawned_ranks_work_and_leave_nothing_when_ended(project: Project) -> None:
    project.fresh = True  # else ranks would be forks here, too
    project.copy("spawned", "ranks_start_method = spawn")
    output = project.run()
    assert "1 failed, 1 passed" in output
    assert "FAILED test_sample.py::test_fails" in output
    project.assert_nothing_is_left()


def test_a_preloaded_module_that_is_missing_is_named(project: Project) -> None:
    project.write("def test_a(world): pass", "ranks_preload = heavvy")
    assert "ranks_preload: cannot import heavvy: ModuleNotFoundError" in project.run()


def test_a_server_with_a_second_thread_is_refused(project: Project) -> None:
    (project.path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    project.write("def test_a(world): pass", "ranks_preload = threaded\npythonpath = .")
    output = project.run()
    assert "has 2 threads after its imports" in output
    assert "ranks_start_method = spawn" in output


def test_a_server_that_dies_in_an_import_is_reported_at_once(project: Project) -> None:
    (project.path / "deadly.py").write_text("import os\nos._exit(3)\n")
    project.write("def test_a(world): pass", "ranks_preload = deadly\npythonpath = .")
    assert "died while importing torch, deadly" in project.run()


def test_a_server_that_dies_has_ended_before_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then it would refuse the connection of the next ranks, as one that lives."""
    looks = iter([False, False, True])
    monkeypatch.setattr(processes, "_has_ended", lambda _: next(looks))
    launcher = ProcessLauncher("forkserver", RankProgram("lockstep.rank:RankSession"))

    def start() -> None:
        raise EOFError

    process = SimpleNamespace(start=start)
    context = SimpleNamespace(Pipe=lambda: (None, None), Process=lambda **_: process)
    monkeypatch.setattr(launcher, "_context", context)
    with pytest.raises(LaunchError, match="died while starting rank 0: it wrote no output"):
        launcher._start_one(SimpleNamespace(rank=0), None)  # type: ignore[arg-type]
    assert [*looks] == []


@pytest.mark.parametrize(
    ("is_server", "error", "words"),
    [
        (True, RuntimeError("it broke"), "RuntimeError: it broke"),
        (True, EOFError("no more"), "EOFError: no more"),
        (False, OSError(errno.EIO, "it broke"), "[Errno 5] it broke"),
        (False, EOFError("the controller has gone away"), ""),
    ],
)
def test_the_last_words_of_a_server_and_its_forks_are_read_once(
    is_server: bool, error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    server_pid = os.getpid() if is_server else os.getppid()
    server._write_last_words(server_pid, str(tmp_path), type(error), error)
    assert ended == [1]
    assert [server.last_words(str(tmp_path)) for _ in range(2)] == [words, ""]


def test_ranks_that_have_started_end_where_another_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = ProcessLauncher("forkserver", RankProgram("lockstep.rank:RankSession"))
    ended: list[str] = []

    def start_one(spec: RankSpec, wire: object) -> Any:
        if spec.rank == 2:
            raise OSError(errno.EIO, "it broke")
        return SimpleNamespace(
            kill=lambda: ended.append(f"kill {spec.rank}"), close=lambda: ended.append(f"close {spec.rank}")
        )

    monkeypatch.setattr(launcher, "make_ready", lambda deadline: None)
    monkeypatch.setattr(launcher, "_start_one", start_one)
    specs: Any = [SimpleNamespace(rank=rank) for rank in range(3)]
    with pytest.raises(LaunchError, match=re.escape("[Errno 5] it broke")):
        launcher.start(specs, deadline=0.0)
    assert ended == ["kill 0", "close 0", "kill 1", "close 1"]
    wires: Any = {0: "wire of 0", 1: "wire of 1"}
    monkeypatch.setattr(launcher, "_start_one", lambda spec, wire: (spec.rank, wire))
    begun: Any = launcher.start(specs[:2], 0.0)
    assert begun == [(0, None), (1, None)]
    begun = launcher.start(specs[1::-1], 0.0, wires)
    assert begun == [(1, "wire of 1"), (0, "wire of 0")]


@pytest.mark.parametrize(
    ("preload", "said"),
    [
        (("slow",), "still importing torch, slow; look for a module in `ranks_preload` that never finishes"),
        ((), "still importing torch; a machine this slow needs a higher --world-timeout"),
    ],
)
def test_a_server_that_takes_too_long_is_reported_with_a_remedy(
    preload: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "status_path", lambda _: tmp_path / "never")
    monkeypatch.setattr(processes, "_has_ended", lambda _: False)
    with pytest.raises(LaunchError, match=re.escape(said)):
        ProcessLauncher(
            "forkserver", RankProgram("lockstep.rank:RankSession", preload=preload)
        )._await_server(deadline=0.0)
