"""How worlds come to life: under which options, from which server, forked or spawned, and what stops them."""

from __future__ import annotations

import getpass
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.exceptions import LaunchError
from harness.launch import processes, server
from harness.launch.processes import ProcessLauncher

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

TESTS = """
import numpy
pytestmark = pytest.mark.ranks(2, timeout=60)

def draw(world):
    numbers = (random.random(), numpy.random.rand(), torch.rand(1).item(), world.seed)
    assert len(set(world.gather(numbers))) == 1
    pathlib.Path(f"numbers-{world.rank}.txt").open("a").write(f"{numbers}\\n")

def test_a_first(world): note(world, "pids"); draw(world)
def test_a_second(world): note(world, "pids"); draw(world)

def test_a_module(world):
    import heavy, sys
    assert heavy.pid == os.getppid()
    assert "torch.distributed.fsdp" not in sys.modules  # which is preloaded where nothing else is asked for

def test_a_failure(world, run_subtests): assert False
def test_not_chosen(world): note(world, "pids")
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--mine")
    parser.addoption("--several", nargs="+")
    parser.getgroup("theirs").addoption("--flag", action="store_true")
"""
CHANGING = (
    *("-o", "console_output_style=classic", "--fresh-worlds", "--world-seed=7", "--world-timeout=0.01"),
    *("-c", "pytest.ini", "--mine=a b", "-vk", "test_a", "--flag", "--tb=short", "--several", "x", "y"),
    *("-n0", "-vs", "-W", "error::EncodingWarning", "--runxfail", "--subtest", "a=1"),
)


@pytest.fixture(scope="module")
def changed(shared_project: Project) -> str:
    """Output of a run with every option that changes one, in a temporary directory too deep for sockets."""
    (shared_project.path / "heavy.py").write_text("import os\npid = os.getpid()\n")
    (shared_project.path / "conftest.py").write_text(CONFTEST)
    shared_project.write(TESTS, "ranks_preload = heavy\npythonpath = .")
    deep = shared_project.path / "tmp" / ("deep" * 20)
    deep.mkdir(parents=True)
    shared_project.plugins = True
    return shared_project.run("test_sample.py", *CHANGING, tmpdir=deep)


def test_the_line_that_runs_it_again_repeats_what_changes_a_run(changed: str) -> None:
    line = next(line for line in changed.splitlines() if line.startswith("pytest test_sample"))
    assert line == (
        "pytest test_sample.py::test_a_failure -c pytest.ini -o console_output_style=classic "
        "-p no:cacheprovider --world-seed 7 --world-timeout 0.01 --fresh-worlds --capture no --runxfail "
        "'--mine=a b' --flag --several x y -W error::EncodingWarning --subtest a=1"
    )


def test_fresh_worlds_gives_every_test_new_processes(changed: str, shared_project: Project) -> None:
    assert "1 failed, 3 passed, 1 deselected" in changed
    assert len(set(shared_project.pids("pids"))) == 2


def test_the_seed_is_the_one_of_the_command_line(changed: str, shared_project: Project) -> None:
    first, second = (shared_project.path / "numbers-0.txt").read_text().splitlines()
    assert first == second
    assert first.startswith(f"({random.Random(7).random()}, ")
    assert first.endswith(" 7)")


def test_preloaded_modules_are_imported_once_and_nothing_beside_them(changed: str) -> None:
    assert "test_sample.py::test_a_module PASSED" in changed


def test_a_temporary_directory_too_deep_for_sockets_is_no_obstacle(
    changed: str, shared_project: Project
) -> None:
    assert len(shared_project.pids("pids")) == 2
    (deep,) = (shared_project.path / "tmp").iterdir()
    assert list(deep.iterdir()) == [deep / f"pytest-of-{getpass.getuser()}"]


def test_the_deadline_of_a_test_does_not_bound_the_start_of_ranks(
    changed: str, shared_project: Project
) -> None:
    assert "--world-timeout 0.01" in changed
    assert len(shared_project.pids("pids")) == 2


SPAWNED = """
def test_gathers(world): assert world.gather(world.rank) == [0, 1]

def test_fails(world):
    if world.rank == 1:
        import subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    world.barrier()
    assert world.rank == 1
    time.sleep(100)
"""


def test_ranks_can_be_spawned_instead_of_forked_and_nothing_outlives_one_that_is_ended(
    project: Project,
) -> None:
    project.write(SPAWNED, "ranks_start_method = spawn")
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


def test_a_server_that_dies_while_it_imports_is_told_at_once(project: Project) -> None:
    (project.path / "deadly.py").write_text("import os\nos._exit(3)\n")
    (project.path / "torch.py").touch()  # nobody needs the real one, which takes long
    project.write("def test_a(world): pass", "ranks_preload = deadly\npythonpath = .")
    assert "died while importing torch, deadly" in project.run()


@pytest.mark.parametrize(
    ("preload", "said"),
    [
        (("slow",), "still importing torch, slow; look for a module in `ranks_preload` that never finishes"),
        ((), "still importing torch; a machine this slow needs a higher --world-timeout"),
    ],
)
def test_a_server_that_takes_too_long_is_told_with_what_to_do(
    preload: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "status_path", lambda _: tmp_path / "never")
    monkeypatch.setattr(processes, "_has_ended", lambda _: False)
    with pytest.raises(LaunchError, match=re.escape(said)):
        ProcessLauncher("forkserver", preload)._await_server(deadline=0.0)
