"""A run that is broken off: by Ctrl-C once or twice, by SIGTERM, at any moment. Nothing is left of it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

INTERRUPT = signal.SIGINT

WAITS = """
@pytest.fixture(scope="session")
def wide(world):
    yield
    note(world, "wide-torn-down")

@pytest.fixture
def narrow(world):
    yield
    note(world, "narrow-torn-down")

@pytest.mark.ranks(1)
def test_other_world(world, wide): pass

def test_waits(world, wide, narrow):
    note(world, "reached")
    if world.rank == 1:
        dist.recv(torch.ones(5), src=0)
    dist.all_reduce(torch.ones(3))
"""


def test_ctrl_c_tears_down_on_ranks_and_says_what_each_did(project: Project) -> None:
    project.write(WAITS)
    process = project.start()
    project.until(lambda: project.pids("reached") and project.pids("reached", rank=1), "the test has begun")
    time.sleep(0.3)  # from the line that notes it to the one that waits
    output = project.break_off(process, INTERRUPT)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    told = output.split("interrupted on ranks", 1)[1].splitlines()
    assert told[1:4] == [
        "test_sample.py::test_waits was running:",
        "  rank 0: all_reduce #1 (float [3]) at test_sample.py:28 in test_waits",
        "  rank 1: recv at test_sample.py:27 in test_waits",
    ]
    assert "!! KeyboardInterrupt !!" in output
    assert "Traceback" not in output
    for rank in (0, 1):
        assert len(project.pids("narrow-torn-down", rank)) == 1
        assert len(project.pids("wide-torn-down", rank)) == (2 if rank == 0 else 1)
    project.assert_nothing_is_left()


HANGS = """
def test_hangs(world):
    import subprocess
    if world.rank == 0:
        subprocess.Popen(["sleep", "300"])
    note(world, "reached")
    if world.rank == 1:  # holds the GIL, and leaves the processor to others
        import ctypes
        library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex), library.pthread_mutex_lock(mutex)
    dist.barrier()
"""


def test_ctrl_c_of_the_controller_alone_leaves_nothing(project: Project) -> None:
    project.write(HANGS)
    process = project.start()
    project.until(lambda: project.pids("reached", rank=1), "the test has begun")
    process.send_signal(INTERRUPT)
    output = process.communicate(timeout=10)[0]
    assert "KeyboardInterrupt" in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    project.assert_nothing_is_left()


def test_a_second_ctrl_c_ends_what_does_not_heed_the_first(project: Project) -> None:
    project.write(HANGS)
    process = project.start()
    project.until(lambda: project.pids("reached", rank=1), "the test has begun")
    output = project.break_off(process, INTERRUPT, INTERRUPT)
    # After the first alone it would wait for the rank that holds the GIL, and tell how that ended.
    assert "interrupted on ranks" not in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    project.assert_nothing_is_left()


REACHED = (
    "import os, time, pathlib\npathlib.Path('reached-0.txt').write_text(str(os.getpid()))\ntime.sleep(300)\n"
)


def test_ctrl_c_leaves_nothing_while_the_server_imports(project: Project) -> None:
    (project.path / "slow.py").write_text(REACHED)
    (project.path / "torch.py").touch()  # nobody needs the real one, which takes long
    project.write("def test_a(world): pass", "ranks_preload = slow\npythonpath = .")
    _break_off_when_reached(project)


def test_ctrl_c_leaves_nothing_during_collection(project: Project) -> None:
    project.write("def test_a(world): pass")
    (project.path / "test_slow_import.py").write_text(REACHED)
    _break_off_when_reached(project)


def test_ctrl_c_leaves_nothing_while_a_world_starts(project: Project) -> None:
    project.write("def test_a(world): pass")
    (project.path / "conftest.py").write_text(
        f"import os\nif os.environ.get('RANK') == '1':\n    {REACHED.replace(chr(10), ';')}\n"
    )
    _break_off_when_reached(project)


def _break_off_when_reached(project: Project) -> None:
    process = project.start()
    project.until(lambda: project.pids("reached"), "the moment has come")
    output = project.break_off(process, INTERRUPT)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "!! KeyboardInterrupt !!" in output
    assert "Traceback" not in output
    project.assert_nothing_is_left()


ENDS = """
@pytest.fixture(scope="session")
def wide(world):
    yield
    note(world, "wide-torn-down")

def test_a(world, wide): note(world, "ran")
"""


STOPS = """
@pytest.mark.ranks(3)  # the world of the fixture stays warm
def test_b(world): assert world.rank

def test_c(world, wide): note(world, "ran")
"""


def test_a_run_that_stops_at_its_first_failure_tears_down_on_ranks(project: Project) -> None:
    project.write(ENDS + STOPS)
    assert "stopping after 1 failures" in project.run("-x")
    assert len(project.pids("ran")) == len(project.pids("wide-torn-down", rank=1)) == 1
    project.assert_nothing_is_left()


SIGTERM = "import os, signal, time\ndef test_ends(): os.kill(os.getpid(), signal.SIGTERM); time.sleep(300)"


def test_sigterm_and_the_limits_of_other_plugins_tear_down_on_ranks(project: Project) -> None:
    project.write(ENDS + "def test_b(world): time.sleep(300)\ndef test_c(world, wide): note(world, 'ran')")
    (project.path / "conftest.py").write_text("""
import os, pytest, signal

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):  # as a plugin with time limits of its own does
    if item.name == "test_b" and "RANK" not in os.environ:
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the plugin's time is over", pytrace=False))
        signal.alarm(1)
    return (yield)
""")
    (project.path / "test_then.py").write_text(SIGTERM)
    output = project.run()
    assert "ERROR test_sample.py::test_b - the plugin's time is over" in output
    assert "Exit: SIGTERM" in output
    assert len(project.pids("ran")) == 2
    assert len(project.pids("wide-torn-down", rank=1)) == 1
    project.assert_nothing_is_left()
