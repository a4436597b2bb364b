"""Processes around the ranks that are killed: the controller, a worker of pytest-xdist, the server."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

# How long ranks and server may live on; the bound is generous, machines are busy. Measured: 0.3 s.
SOON = 10.0

HANG = """
@pytest.mark.ranks(SIZE)
def test_hangs(world):
    import subprocess
    subprocess.Popen(["sleep", "300"])
    note(world, "reached")
    match world.rank:
        case 0: sum(range(10**12))
        case 1: os.kill(os.getpid(), signal.SIGSTOP)
        case 2: time.sleep(300)
        case 3: dist.barrier()
"""


@pytest.mark.parametrize(("method", "size"), [("forkserver", 4), ("spawn", 2)])
def test_ranks_and_server_end_when_the_controller_is_killed(project: Project, method: str, size: int) -> None:
    project.write(HANG.replace("SIZE", str(size)), f"ranks_start_method = {method}")
    process = project.start()
    project.until(lambda: all(project.pids("reached", rank) for rank in range(size)), "the test has begun")
    process.kill()
    process.communicate(timeout=60)
    project.assert_nothing_is_left(SOON)


def test_ranks_end_in_their_start_when_the_terminal_is_closed(project: Project) -> None:
    project.write("def test_a(world): pass")
    (project.path / "conftest.py").write_text("""
import os, pathlib, signal, time
if "RANK" in os.environ:
    pathlib.Path(f"reached-{os.environ['RANK']}.txt").write_text(str(os.getpid()))
    sum(range(10**12)) if os.environ["RANK"] == "0" else os.kill(os.getpid(), signal.SIGSTOP)
""")
    process = project.start()
    project.until(lambda: project.pids("reached") and project.pids("reached", rank=1), "ranks start")
    project.break_off(process, signal.SIGHUP)
    project.assert_nothing_is_left(SOON)


def test_the_server_ends_in_an_import_without_end_when_the_controller_is_killed(project: Project) -> None:
    (project.path / "endless.py").write_text(
        "import pathlib, time\npathlib.Path('reached-0.txt').write_text('0')\ntime.sleep(300)\n"
    )
    (project.path / "torch.py").touch()  # nobody needs the real one, which takes long
    project.write("def test_a(world): pass", "ranks_preload = endless\npythonpath = .")
    process = project.start()
    project.until(lambda: project.pids("reached"), "the server imports")
    process.kill()
    process.communicate(timeout=60)
    project.assert_nothing_is_left(SOON)


def test_the_server_is_replaced_and_living_worlds_do_not_mind(project: Project) -> None:
    project.write("""
server = os.getppid()

def test_kills_the_server(world):
    note(world, "living")
    if world.rank == 0:
        os.kill(server, signal.SIGKILL)
    while os.getppid() == server: time.sleep(0.01)
    world.barrier()

def test_goes_on(world):
    note(world, "living")
    world.barrier()

@pytest.mark.ranks(3)
def test_on_a_world_of_a_new_server(world):
    world.barrier()

@pytest.mark.ranks(2, fresh=True)
def test_dies(world):
    if world.rank == 1:
        pathlib.Path("armed").touch()
        os._exit(7)

@pytest.mark.ranks(2, fresh=True)
def test_kills_the_server_as_its_world_starts(world): pass

def test_outlives_it(world):
    note(world, "living")
    world.barrier()

@pytest.mark.ranks(2, fresh=True)
def test_on_a_world_of_a_third_server(world):
    world.barrier()
""")
    (project.path / "conftest.py").write_text("""
import os, pathlib, signal
if os.environ.get("RANK") == "1" and pathlib.Path("armed").exists():
    pathlib.Path("armed").unlink()
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(3)
""")
    output = project.run()
    assert "1 failed, 5 passed, 1 error" in output
    assert "rank 1 of 2 exited with code 7" in output
    assert "ERROR test_sample.py::test_kills_the_server_as_its_world_starts" in output
    assert "no world of 2 ranks (gloo, cpu): rank 1" in output
    assert len(set(project.pids("living"))) == 1
    assert "Traceback" not in output
    project.assert_nothing_is_left()


def test_a_dead_xdist_worker_takes_its_ranks_along_and_nobody_elses(project: Project) -> None:
    project.write("""
@pytest.mark.parametrize("turn", range(4))
def test_on_ranks(world, turn):
    note(world, os.environ["PYTEST_XDIST_WORKER"])
    time.sleep(0.1)
    world.barrier()
""")
    (project.path / "test_unmarked.py").write_text("""
import os, pathlib, signal, time
def test_crashes():
    worker = os.environ["PYTEST_XDIST_WORKER"]
    while not pathlib.Path(f"{worker}-0.txt").exists(): time.sleep(0.01)
    pathlib.Path("dead").write_text(f"{worker} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)
""")
    project.plugins = True
    process = project.start("-n2", "test_sample.py", "test_unmarked.py")
    output = process.communicate(timeout=120)[0]
    assert "1 failed, 4 passed" in output
    assert "crashed while running 'test_unmarked.py::test_crashes'" in output
    worker = (project.path / "dead").read_text().split()[0]
    (other,) = {"gw0", "gw1"} - {worker}
    assert len(set(project.pids(other))) == 1
    project.assert_nothing_is_left()
