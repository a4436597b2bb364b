"""The life of worlds: kept warm, made fresh, replaced, put back in order, closed. One session shows it."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from suites.selftest.conftest import Project

CONFTEST = """
import json, os, pathlib, pytest
import harness.world.world, harness.world.pool

harness.world.world.CLOSE_WITHIN = 0.1
harness.world.pool.MOST_WARM = 2  # few worlds then crowd one out

def pytest_configure():
    if os.environ.get("RANK") == "1" and os.environ["WORLD_SIZE"] == "4":
        raise pytest.UsageError("rank 1 has no licence")

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    if os.environ.get("RANK") == "1" and item.name == "test_silent":
        return True

def pytest_terminal_summary(terminalreporter):
    told = {
        category: [[each.nodeid, getattr(each, "message", "") or each.longreprtext] for each in reports]
        for category, reports in terminalreporter.stats.items()
    }
    pathlib.Path("told.json").write_text(json.dumps(told))
"""
# By file, in the order in which they run.
TESTS = {
    "warm": """
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
""",
    "restored": """
def test_changes(world):
    note(world, "pids")
    torch.set_default_dtype(torch.float64); torch.set_default_device("meta"); torch.set_grad_enabled(False)
    torch.set_num_threads(2); torch.use_deterministic_algorithms(True); torch.backends.cudnn.benchmark = True
    os.environ["LEFT"] = "1"; os.environ.pop("HOME"); os.chdir("/"); dist.new_group([0, 1])

def test_sees_nothing_of_it(world):
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled() and torch.get_num_threads() == 1 and not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    assert "LEFT" not in os.environ and "HOME" in os.environ and os.getcwd() != "/"
    assert len(dist.distributed_c10d._world.pg_map) == 1

def test_was_not_replaced(world): note(world, "pids")

def test_makes_a_mesh_without_a_word(world):
    note(world, "pids"); world.mesh(2, 1, names=("a", "b"))
""",
    "wide": """
@pytest.fixture(scope="module", autouse=True)
def doubles():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)

def test_a(world): assert torch.get_default_dtype() == torch.float64
def test_b(world): assert torch.get_default_dtype() == torch.float64; torch.set_default_dtype(torch.float16)
def test_c(world): assert torch.get_default_dtype() == torch.float64
""",
    "after_wide": "def test_after(world): assert torch.get_default_dtype() == torch.float32",
    "on_request": """
@pytest.fixture(scope="module")
def wide():
    os.environ["WIDE"] = "1"
    yield
    del os.environ["WIDE"]

def test_a(world, request, monkeypatch):
    monkeypatch.setenv("NARROW", "1")
    request.getfixturevalue("wide")

def test_b(world): assert "NARROW" not in os.environ and os.environ["WIDE"] == "1"
""",
    "seeds": """
import numpy

def draw(world):
    numbers = (random.random(), numpy.random.rand(), torch.rand(1).item(), world.seed)
    assert len(set(world.gather(numbers))) == 1
    pathlib.Path(f"numbers-{world.rank}.txt").open("a").write(f"{numbers}\\n")

def test_a(world): draw(world)
def test_b(world): draw(world)
""",
    "loopback": """
import socket
def test_a(world):
    dist.barrier()
    listening = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
    files = pathlib.Path("/proc/self/fd").iterdir()
    mine = {os.readlink(file) for file in files if os.path.lexists(file)}
    mine = {line[1].split(":")[0] for line in listening if f"socket:[{line[9]}]" in mine}
    assert mine == {"0100007F"}
""",
    "import_before": """
@pytest.mark.ranks(2, timeout=1)
def test_quick(world): world.barrier()
""",
    "import": """
if "RANK" in os.environ:
    time.sleep(2)
    torch.set_default_dtype(torch.float64)
def test_after(world): assert torch.get_default_dtype() == torch.float64
""",
    "no_import": """
if os.environ.get("RANK") == "1": import nowhere_to_be_found
def test_a(world): pass
""",
    "no_start": """
@pytest.mark.ranks(4)
def test_a(world): pass
""",
    "breaks_late": """
@pytest.fixture(scope="session")
def breaks_late():
    yield
    assert False, "closing"

@pytest.mark.ranks(1)
def test_a(world, breaks_late): pass

@pytest.mark.parametrize("i", range(2))
@pytest.mark.ranks(2, 3)
def test_crowds_it_out(world, i): pass

@pytest.mark.ranks(1)
def test_b(world): pass
""",
    "wide_deadline": """
@pytest.fixture(scope="module")
def wide():
    yield
    time.sleep(1)
    pathlib.Path("torn-down.txt").touch()

def test_a(world, wide): assert False
def test_b(world): pass
""",
    "pace": """
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
""",
    "silence": """
def test_silent(world): assert world.rank == 0

def test_subtests_disagree(world, subtests):
    with subtests.test("sometimes"):
        if world.rank == 1:
            pytest.skip("no")
    if world.rank == 0:
        with subtests.test("here only"):
            pass
""",
    "death": """
def test_dies(world): os._exit(1)
def test_leaves_a_child(world):
    import subprocess
    subprocess.Popen(["sleep", "300"])
""",
    "bomb": """
def test_leaves_a_bomb(world):
    import threading
    if world.rank == 1:
        threading.Timer(0.6, os._exit, (9,)).start()

@pytest.mark.ranks(1)
def test_meanwhile(world): time.sleep(1)

def test_innocent(world): world.barrier()
""",
}


@dataclass(frozen=True)
class Session:
    """What the one session said of its tests."""

    project: Project
    output: str
    told: dict[str, list[tuple[str, str]]]
    """Node id and text of each report, by pytest's own categories."""
    shared_memory: set[str]
    """What was there before."""

    def outcomes(self, file: str) -> dict[str, int]:
        """Count as pytest's last line does, in one file."""
        counts = {category: len(self._of(file, category)) for category in self.told}
        return {category: count for category, count in counts.items() if count and category}

    def warnings(self, file: str) -> list[str]:
        return self._of(file, "warnings")

    def failure(self, file: str, test: str) -> str:
        """What was told of the failures and errors of one test."""
        told = [*self.told.get("failed", []), *self.told.get("error", [])]
        return "\n".join(text for nodeid, text in told if nodeid == f"test_{file}.py::{test}")

    def _of(self, file: str, category: str) -> list[str]:
        told = self.told.get(category, [])
        return [text for nodeid, text in told if nodeid.startswith(f"test_{file}.py::")]


@pytest.fixture(scope="module")
def session(shared_project: Project) -> Session:
    path, shared_memory = shared_project.path, set(os.listdir("/dev/shm"))
    shared_project.write("")
    (path / "conftest.py").write_text(CONFTEST)
    for file, tests in TESTS.items():
        (path / f"test_{file}.py").write_text(shared_project.header + tests)
    # Torch makes a folder for what it compiles, where deterministic algorithms are asked for.
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(path / "inductor")}
    output = shared_project.run(*(f"test_{file}.py" for file in TESTS), environ=environ)
    return Session(shared_project, output, json.loads((path / "told.json").read_text()), shared_memory)


def test_nothing_is_left_after_a_run_with_failures(session: Session) -> None:
    assert session.outcomes("death") == {"failed": 1, "passed": 1, "warnings": 2}
    session.project.assert_nothing_is_left()
    # What another run has there meanwhile goes as well.
    session.project.until(lambda: {*os.listdir("/dev/shm")} <= session.shared_memory, "no segment is left")


def test_worlds_are_warm_by_size_fresh_on_request_and_replaced_after_a_failure(session: Session) -> None:
    assert session.outcomes("warm") == {"failed": 1, "passed": 7}
    warm, replaced, fresh, three = map(session.project.pids, ("warm", "replaced", "fresh", "three"))
    assert len(warm) == 4
    assert len(set(warm)) == 1
    assert len(three) == 2
    assert len(set(three)) == 1
    assert len(replaced) == len(fresh) == 1
    assert not {*warm, *three} & {*replaced, *fresh}
    assert set(session.project.pids("warm", rank=1)).isdisjoint(warm)


def test_what_a_test_changes_is_put_back_and_told(session: Session) -> None:
    assert session.outcomes("restored") == {"passed": 4, "warnings": 2}
    pids = session.project.pids("pids")
    assert len(pids) == 3
    assert len(set(pids)) == 1
    for rank, told in enumerate(session.warnings("restored")):  # one of each rank, none of the mesh
        assert f"rank {rank}: the test left behind" in told
        assert "default dtype: torch.float64 (was torch.float32)" in told
        assert "environ: HOME, LEFT" in told
        assert "1 process group" in told


def test_what_a_wider_fixture_changes_stands_until_it_ends(session: Session) -> None:
    assert session.outcomes("wide") == {"passed": 3, "warnings": 2}
    assert session.outcomes("after_wide") == {"passed": 1}
    for told in session.warnings("wide"):
        assert "default dtype: torch.float16 (was torch.float64)" in told


def test_a_fixture_made_on_request_does_not_adopt_what_the_test_changed(session: Session) -> None:
    assert session.outcomes("on_request") == {"passed": 2}


def test_seeds_are_equal_on_all_ranks_before_every_test(session: Session) -> None:
    assert session.outcomes("seeds") == {"passed": 2}
    first, second = (session.project.path / "numbers-0.txt").read_text().splitlines()
    assert first == second
    assert first.startswith(f"({random.Random(0).random()}, ")
    assert first.endswith(" 0)")


def test_groups_are_bound_to_the_loopback_interface_and_open_no_other_port(session: Session) -> None:
    assert session.outcomes("loopback") == {"passed": 1}


def test_importing_the_next_file_is_no_part_of_a_test(session: Session) -> None:
    assert session.outcomes("import_before") == {"passed": 1}
    assert session.outcomes("import") == {"passed": 1}


def test_a_file_that_one_rank_cannot_import_fails_its_tests_there(session: Session) -> None:
    assert session.outcomes("no_import") == {"error": 1}
    assert session.failure("no_import", "test_a").startswith("rank 1 of 2 failed\n")
    assert "No module named 'nowhere_to_be_found'" in session.failure("no_import", "test_a")


def test_a_rank_that_cannot_start_says_why(session: Session) -> None:
    assert session.outcomes("no_start") == {"error": 1}
    told = session.failure("no_start", "test_a")
    assert told.startswith("no world of 4 ranks (gloo, cpu): rank 1")
    assert "rank 1 has no licence" in told


def test_a_wide_fixture_that_breaks_as_its_world_closes_fails_the_run(session: Session) -> None:
    assert session.outcomes("breaks_late") == {"passed": 6, "error": 1}
    assert "ERROR test_breaks_late.py::test_a" in session.output
    assert "AssertionError: closing" in session.failure("breaks_late", "test_a")


def test_a_wide_fixture_has_the_deadline_of_a_test_for_its_tear_down_after_a_failure(
    session: Session,
) -> None:
    assert session.outcomes("wide_deadline") == {"failed": 1, "passed": 1}
    assert (session.project.path / "torn-down.txt").exists()


def test_ranks_may_leave_a_collective_and_a_failed_test_at_their_own_pace(session: Session) -> None:
    assert session.outcomes("pace") == {"failed": 1, "passed": 1}
    torn_down = [session.project.pids("torn-down", rank) for rank in (0, 1)]
    assert [len(pids) for pids in torn_down] == [1, 1]


def test_silence_and_disagreement_are_no_success(session: Session) -> None:
    assert "rank 1 of 2 sent no report of the setup phase" in session.failure("silence", "test_silent")
    told = session.failure("silence", "test_subtests_disagree")
    assert "skipped it and others did not: ranks disagree" in told
    assert "rank 1 of 2 did not reach it and others did: ranks disagree" in told


def test_a_rank_that_died_between_tests_fails_the_test_before_not_the_one_after(session: Session) -> None:
    assert session.outcomes("bomb") == {"passed": 3, "error": 1, "warnings": 1}  # its timer is told as well
    assert session.failure("bomb", "test_leaves_a_bomb")
    assert "ERROR test_bomb.py::test_leaves_a_bomb" in session.output


# Not with the others: there the harness's own preloading makes it cheap.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("turn", [0, 1])
def test_dtensors_of_one_test_do_not_meet_the_groups_of_another(world: Any, turn: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = dist.new_group()
    mesh = DeviceMesh.from_group(group, "cpu")
    tensor = DTensor.from_local(torch.ones(1), mesh, [Shard(0)]).detach()
    assert tensor.full_tensor().tolist() == [1, 1]
    dist.destroy_process_group(group)
