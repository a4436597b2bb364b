"""Processes around the ranks that are killed: the controller, a worker of pytest-xdist, the server."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.project import Project

# How long ranks and server may live on; the bound is generous, machines are busy. Measured: 0.3 s.
SOON = 10.0


@pytest.mark.parametrize(("method", "size"), [("forkserver", 3), ("spawn", 2)])
def test_ranks_and_server_end_when_the_controller_is_killed(project: Project, method: str, size: int) -> None:
    project.fresh = method == "spawn"  # else ranks would be forks here, too
    project.copy("hanging", f"ranks_start_method = {method}")
    process = project.start(environ={"SIZE": str(size)})
    project.wait_for(lambda: all(project.pids("reached", rank) for rank in range(size)), "the test has begun")
    process.kill()
    process.communicate(timeout=180)
    project.assert_nothing_is_left(SOON)


def test_starting_ranks_end_when_the_terminal_is_closed(project: Project) -> None:
    project.write("def test_a(world): pass")
    (project.path / "conftest.py").write_text("""
import os, pathlib, signal, time
if "RANK" in os.environ:
    pathlib.Path(f"reached-{os.environ['RANK']}.txt").write_text(str(os.getpid()))
    sum(range(10**12)) if os.environ["RANK"] == "0" else os.kill(os.getpid(), signal.SIGSTOP)
""")
    process = project.start()
    project.wait_for(lambda: project.pids("reached") and project.pids("reached", rank=1), "ranks start")
    project.interrupt(process, signal.SIGHUP)
    project.assert_nothing_is_left(SOON)


def test_an_importing_server_ends_when_the_controller_is_killed(project: Project) -> None:
    project.fresh = True
    (project.path / "torch.py").touch()  # instead of the real one, which takes long
    project.copy("slow_import", "ranks_preload = slow\npythonpath = .")
    process = project.start()
    project.wait_for(lambda: project.pids("reached"), "the server imports")
    process.kill()
    process.communicate(timeout=180)
    project.assert_nothing_is_left(SOON)


def test_a_killed_server_is_replaced_and_living_worlds_go_on(project: Project) -> None:
    project.copy("replaced_server")
    output = project.run()
    assert "1 failed, 5 passed, 1 error" in output
    assert "rank 1 of 2 exited with code 7" in output
    assert "ERROR test_sample.py::test_kills_the_server_as_its_world_starts" in output
    assert "no world of 2 ranks (gloo, cpu): rank 1" in output
    assert len(set(project.pids("living"))) == 1
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_a_dead_xdist_worker_ends_its_own_ranks_only(project: Project) -> None:
    project.copy("dead_worker")
    project.plugins = True
    output = project.run("-n2", "test_sample.py", "test_unmarked.py")
    assert "1 failed, 4 passed" in output
    assert "crashed while running 'test_unmarked.py::test_crashes'" in output
    worker = (project.path / "dead").read_text().split()[0]
    (other,) = {"gw0", "gw1"} - {worker}
    assert len(set(project.pids(other))) == 1
    project.assert_nothing_is_left()
