"""The life of worlds: kept warm, made fresh, replaced, put back in order, and gone at the end."""

from __future__ import annotations

import getpass
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.exceptions import LaunchError
from harness.launch import processes, server
from harness.launch.processes import ProcessLauncher

if TYPE_CHECKING:
    from suites.selftest.conftest import Project


def test_worlds_are_warm_by_size_fresh_on_request_and_replaced_after_a_failure(project: Project) -> None:
    project.write("""
def test_a(world): note(world, "warm")
@pytest.mark.ranks(3)
def test_other_size(world): note(world, "three")
def test_b(world): note(world, "warm")
@pytest.mark.ranks(2, fresh=True)
def test_fresh(world): note(world, "fresh")
def test_c(world): note(world, "warm")
def test_failing(world): note(world, "warm"); assert world.rank == 0
def test_d(world): note(world, "replaced")
@pytest.mark.ranks(3)
def test_other_size_again(world): note(world, "three")
""")
    assert "1 failed, 7 passed" in project.run()
    warm, replaced, fresh, three = map(project.pids, ("warm", "replaced", "fresh", "three"))
    assert len(warm) == 4
    assert len(set(warm)) == 1
    assert len(three) == 2
    assert len(set(three)) == 1
    assert not {*warm, *three} & {*replaced, *fresh}
    assert set(project.pids("warm", rank=1)).isdisjoint(warm)


def test_fresh_worlds_gives_every_test_new_processes(project: Project) -> None:
    project.write("""
def test_a(world): note(world, "pids")
def test_b(world): note(world, "pids")
""")
    assert "2 passed" in project.run("--fresh-worlds")
    assert len(set(project.pids("pids"))) == 2


def test_what_a_test_changes_is_put_back_and_told(project: Project) -> None:
    project.write("""
def test_changes(world):
    torch.set_default_dtype(torch.float64); torch.set_default_device("meta"); torch.set_grad_enabled(False)
    torch.set_num_threads(2); torch.use_deterministic_algorithms(True); torch.backends.cudnn.benchmark = True
    os.environ["LEFT"] = "1"; os.environ.pop("HOME"); os.chdir("/"); dist.new_group([0, 1])

def test_sees_nothing_of_it(world):
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled() and torch.get_num_threads() == 1 and not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert "LEFT" not in os.environ and "HOME" in os.environ and os.getcwd() != "/"
    assert len(dist.distributed_c10d._world.pg_map) == 1

def test_was_not_replaced(world):
    note(world, "pids")

def test_makes_a_mesh_without_a_word(world):
    note(world, "pids"); world.mesh(2, 1, names=("a", "b"))
""")
    output = project.run("--disable-warnings")
    assert "4 passed" in output
    assert len(set(project.pids("pids"))) == 1
    output = project.run("-k", "changes or mesh")
    told = next(line for line in output.splitlines() if "rank 1: the test left behind" in line)
    for what in (
        "default dtype: torch.float64 (was torch.float32)",
        "environ: HOME, LEFT",
        "1 process group",
    ):
        assert what in told
    assert output.count("the test left behind") == 2  # one for each rank, none for the mesh


def test_dtensors_of_one_test_do_not_meet_the_groups_of_another(project: Project) -> None:
    project.write("""
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

@pytest.mark.parametrize("turn", [0, 1])
def test_gathers(world, turn):
    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).detach()
    assert tensor.full_tensor().tolist() == [1, 1]
    dist.destroy_process_group(group)
""")
    assert "2 passed" in project.run()


def test_what_a_wider_fixture_changes_stands_until_it_ends(project: Project) -> None:
    project.write("""
@pytest.fixture(scope="module", autouse=True)
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)

def test_a(world): assert torch.get_default_dtype() == torch.float64
def test_b(world): assert torch.get_default_dtype() == torch.float64; torch.set_default_dtype(torch.float16)
def test_c(world): assert torch.get_default_dtype() == torch.float64
""")
    (project.path / "test_after.py").write_text(
        project.header + "def test_after(world): assert torch.get_default_dtype() == torch.float32"
    )
    output = project.run("test_sample.py", "test_after.py")
    assert "4 passed" in output
    assert "default dtype: torch.float16 (was torch.float64)" in output


def test_seeds_are_equal_on_all_ranks_before_every_test(project: Project) -> None:
    draw = """
    numbers = (random.random(), numpy.random.rand(), torch.rand(1).item(), world.seed)
    assert len(set(world.gather(numbers))) == 1
    pathlib.Path(f"numbers-{world.rank}.txt").open("a").write(f"{numbers}\\n")
"""
    project.write(f"import numpy\ndef test_a(world):{draw}\ndef test_b(world):{draw}")
    assert "2 passed" in project.run()
    assert "2 passed" in project.run("--world-seed=7")
    first, second, third, fourth = (project.path / "numbers-0.txt").read_text().splitlines()
    assert first == second != third == fourth
    assert third.endswith(" 7)")


def test_nothing_is_left_after_a_run_with_failures(project: Project) -> None:
    shared_memory = sorted(os.listdir("/dev/shm"))
    project.write("""
def test_passes(world): pass
def test_fails(world): assert world.rank
def test_dies(world): os._exit(1)
def test_leaves_a_child(world):
    import subprocess
    subprocess.Popen(["sleep", "300"])
""")
    assert "2 failed, 2 passed" in project.run()
    project.until(lambda: not project.processes(), "no rank, server or child of a test is left", seconds=5)
    assert project.temporary_files() == []
    assert sorted(os.listdir("/dev/shm")) == shared_memory


HANGS = """
def test_hangs(world):
    import subprocess
    if world.rank == 0:
        subprocess.Popen(["sleep", "300"])
    note(world, "reached")
    if world.rank == 1:
        sum(range(10**12))
    dist.barrier()
"""


def test_nothing_is_left_after_ctrl_c(project: Project) -> None:
    project.write(HANGS)
    process = project.start()
    project.until(lambda: project.pids("reached", rank=1), "the test has begun")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=10)[0]
    assert "KeyboardInterrupt" in output
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    project.until(lambda: not project.processes(), "ranks and server have ended", seconds=5)
    assert project.temporary_files() == []


def test_nothing_is_left_after_the_controller_was_killed(project: Project) -> None:
    project.write(HANGS)
    process = project.start()
    project.until(lambda: project.pids("reached", rank=1), "the test has begun")
    process.kill()
    process.communicate(timeout=10)
    project.until(lambda: not project.processes(), "ranks and server have ended by themselves", seconds=5)
    assert project.temporary_files() == []


def test_a_temporary_directory_too_deep_for_sockets_is_no_obstacle(project: Project) -> None:
    project.write("def test_a(world): world.barrier()")
    deep = project.path / "tmp" / ("deep" * 20)
    deep.mkdir(parents=True)
    assert "1 passed" in project.run(tmpdir=deep)
    assert list(deep.iterdir()) == [deep / f"pytest-of-{getpass.getuser()}"]


def test_nothing_outlives_a_spawned_rank_that_is_ended(project: Project) -> None:
    tests = """
def test_a(world):
    if world.rank == 1:
        import subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    world.barrier()
    assert world.rank == 1
    time.sleep(100)
"""
    project.write(tests, "ranks_start_method = spawn")
    assert "1 failed" in project.run()
    project.assert_nothing_is_left()


def test_ranks_can_be_spawned_instead_of_forked(project: Project) -> None:
    project.write(
        "def test_a(world): assert world.gather(world.rank) == [0, 1]", "ranks_start_method = spawn"
    )
    assert "1 passed" in project.run()


def test_an_unknown_start_method_is_refused(project: Project) -> None:
    project.write("def test_a(world): pass", "ranks_start_method = fork")
    assert "ranks_start_method = 'fork': choose forkserver or spawn" in project.run()


def test_preloaded_modules_are_imported_once_and_a_missing_one_is_named(project: Project) -> None:
    (project.path / "heavy.py").write_text("import os\npid = os.getpid()\n")
    tests = "def test_a(world):\n    import heavy\n    assert heavy.pid == os.getppid()"
    project.write(tests, "ranks_preload = heavy\npythonpath = .")
    assert "1 passed" in project.run()
    project.write(tests, "ranks_preload = heavvy")
    assert "ranks_preload: cannot import heavvy: ModuleNotFoundError" in project.run()


def test_a_server_with_a_second_thread_is_refused(project: Project) -> None:
    (project.path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    project.write("def test_a(world): pass", "ranks_preload = threaded\npythonpath = .")
    output = project.run()
    assert "has 2 threads after its imports" in output
    assert "ranks_start_method = spawn" in output


def test_a_rank_that_cannot_start_says_why(project: Project) -> None:
    project.write("def test_a(world): pass")
    (project.path / "conftest.py").write_text(
        "import os, pytest\n"
        "def pytest_configure(config):\n"
        "    if os.environ.get('RANK') == '1': raise pytest.UsageError('rank 1 has no licence')\n"
    )
    output = project.run()
    assert "no world of 2 ranks (gloo, cpu): rank 1" in output
    assert "rank 1 has no licence" in output


def test_a_file_that_one_rank_cannot_import_fails_its_tests_there(project: Project) -> None:
    project.write("""
if os.environ.get("RANK") == "1": import nowhere_to_be_found
def test_a(world): pass
""")
    output = project.run()
    assert "rank 1 of 2 failed" in output
    assert "No module named 'nowhere_to_be_found'" in output


def test_groups_are_bound_to_the_loopback_interface_and_open_no_other_port(project: Project) -> None:
    project.write("""
import socket
def test_a(world):
    dist.barrier()
    listening = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
    files = pathlib.Path("/proc/self/fd").iterdir()
    mine = {os.readlink(file) for file in files if os.path.lexists(file)}
    mine = {line[1].split(":")[0] for line in listening if f"socket:[{line[9]}]" in mine}
    assert mine == {"0100007F"}
""")
    assert "1 passed" in project.run()


def test_a_wide_fixture_that_breaks_as_its_world_closes_fails_the_run(project: Project) -> None:
    project.write("""
@pytest.fixture(scope="session")
def breaks_late():
    yield
    assert False, "closing"

@pytest.mark.ranks(1)
def test_a(world, breaks_late): pass

@pytest.mark.parametrize("i", range(4))
@pytest.mark.ranks(2, 3, 4, 5)
def test_crowds_it_out(world, i): pass

@pytest.mark.ranks(1)
def test_b(world): pass
""")
    output = project.run()
    assert "ERROR test_sample.py::test_a" in output
    assert "AssertionError: closing" in output
    assert "18 passed, 1 error" in output


def test_a_rank_that_died_between_tests_fails_the_test_before_not_the_one_after(project: Project) -> None:
    project.write("""
def test_leaves_a_bomb(world):
    import threading
    if world.rank == 1:
        threading.Timer(0.6, os._exit, (9,)).start()

@pytest.mark.ranks(1)
def test_meanwhile(world): time.sleep(1)

def test_innocent(world): world.barrier()
""")
    output = project.run()
    assert "ERROR test_sample.py::test_leaves_a_bomb" in output
    assert "3 passed, 1 warning, 1 error" in output  # its timer is told as well


def test_ranks_may_leave_a_collective_and_a_failed_test_at_their_own_pace(project: Project) -> None:
    project.write("""
@pytest.mark.ranks(3)
def test_one_way(world):
    if world.rank == 2:
        time.sleep(2)
    dist.gather(torch.ones(1), [torch.zeros(1) for _ in range(3)] if world.rank == 1 else None, dst=1)

@pytest.fixture
def slow_to_tear_down(world):
    yield
    time.sleep(1)
    note(world, "torn-down")

def test_fails(world, slow_to_tear_down): assert False
""")
    assert "1 failed, 1 passed" in project.run()
    assert len(project.pids("torn-down", rank=0)) == len(project.pids("torn-down", rank=1)) == 1


def test_importing_the_next_file_is_no_part_of_a_test(project: Project) -> None:
    project.write("@pytest.mark.ranks(2, timeout=1)\ndef test_quick(world): world.barrier()")
    later = "import time, torch\ntime.sleep(2)\ntorch.set_default_dtype(torch.float64)\n"
    (project.path / "test_slow_import.py").write_text(
        later + project.header + "def test_after(world): assert torch.get_default_dtype() == torch.float64"
    )
    assert "2 passed" in project.run("-W", "error")


def test_a_fixture_made_on_request_does_not_adopt_what_the_test_changed(project: Project) -> None:
    project.write("""
@pytest.fixture(scope="module")
def wide():
    os.environ["WIDE"] = "1"

def test_a(world, request, monkeypatch):
    monkeypatch.setenv("NARROW", "1")
    request.getfixturevalue("wide")

def test_b(world): assert "NARROW" not in os.environ and os.environ["WIDE"] == "1"
""")
    assert "2 passed" in project.run("-W", "error")


def test_silence_and_disagreement_are_no_success(project: Project) -> None:
    project.write("""
def test_silent(world): assert world.rank == 0

def test_subtests_disagree(world, subtests):
    with subtests.test("sometimes"):
        if world.rank == 1:
            pytest.skip("no")
    if world.rank == 0:
        with subtests.test("here only"):
            pass
""")
    (project.path / "conftest.py").write_text(
        "import os, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item):\n"
        "    if os.environ.get('RANK') == '1' and item.name == 'test_silent': return True\n"
    )
    output = project.run()
    assert "rank 1 of 2 said nothing of the setup" in output
    assert "skipped it and others did not: ranks disagree" in output
    assert "rank 1 of 2 never came to it and others did not: ranks disagree" in output


def test_a_server_that_dies_while_it_imports_is_told_at_once(project: Project) -> None:
    (project.path / "deadly.py").write_text("import os\nos._exit(3)\n")
    project.write("def test_a(world): pass", "ranks_preload = deadly\npythonpath = .")
    assert "died while it imported torch, deadly" in project.run()


def test_a_wide_fixture_has_the_deadline_of_a_test_for_its_tear_down_after_a_failure(
    project: Project,
) -> None:
    (project.path / "conftest.py").write_text("import harness.world.world as w\nw.CLOSE_WITHIN = 0.1\n")
    project.write("""
@pytest.fixture(scope="module")
def wide():
    yield
    time.sleep(1)
    pathlib.Path("torn-down.txt").touch()

def test_a(world, wide): assert False
def test_b(world): pass
""")
    output = project.run()
    assert "1 failed, 1 passed" in output
    assert (project.path / "torn-down.txt").exists()


def test_the_deadline_of_a_test_does_not_bound_the_start_of_ranks(project: Project) -> None:
    project.write("@pytest.mark.ranks(2, timeout=60)\ndef test_a(world): pass")
    assert "1 passed" in project.run("--world-timeout=0.01")


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


def test_the_line_that_runs_it_again_repeats_what_changes_a_run(project: Project) -> None:
    project.write("def test_a(world, run_subtests): assert False")
    (project.path / "conftest.py").write_text("""
def pytest_addoption(parser):
    parser.addoption("--mine")
    parser.addoption("--several", nargs="+")
    parser.getgroup("theirs").addoption("--flag", action="store_true")
""")
    options = ["-o", "console_output_style=classic", "--fresh-worlds", "--world-seed=3", "-c", "pytest.ini"]
    others = ["--mine=a b", "-vk", "a", "--flag", "--tb=short", "-W", "error", "--several", "x", "y", "-n0"]
    changing = ["-vs", "--runxfail", "--subtest", "a=1"]
    output = project.run("test_sample.py", *options, *others, *changing)
    line = next(line for line in output.splitlines() if line.startswith("pytest test_sample"))
    assert line == (
        "pytest test_sample.py::test_a -c pytest.ini -o console_output_style=classic -p no:cacheprovider "
        "--world-seed 3 --fresh-worlds --capture no --runxfail '--mine=a b' --flag -W error --several x y "
        "--subtest a=1"
    )
