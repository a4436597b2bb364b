"""Leases of ranks: the number that runs at once on a machine which several pytest runs share."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from suites.selftest.project import copy_project, wait_for
from suites.selftest.warm_pytest import run_to_end

# Three runs at once that share four ranks: one is killed, one is patient, one has two controllers.


@dataclass(frozen=True)
class Shared:
    """Files and output of three runs that shared four ranks."""

    path: Path
    killed: int
    descriptors: dict[str, list[str]]
    """By the role of a process of the run that was killed: its open files in the lease store."""
    patient: str
    many: str


def environment(path: Path) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return environ | {"LOCKSTEP_LEASES": str(path / "leases")}


def arguments(path: Path, *args: str) -> list[str]:
    return ["-p", "no:cacheprovider", f"--basetemp={path}/tmp-{args[-1]}", *args]


def run(path: Path, *args: str) -> str:
    """Run pytest to its end; return what it printed."""
    return run_to_end(arguments(path, *args), path, environment(path), timeout=240)[1]


def open_entries(path: Path, pid: int) -> list[str]:
    """Return which files of the lease store a process has open."""
    targets = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(os.readlink(link))
    return [Path(target).suffix for target in targets if target.startswith(str(path / "leases"))]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def describe(path: Path, controller: int) -> dict[str, list[str]]:
    found = {"controller": open_entries(path, controller), "rank": [], "server": []}
    for child in children(controller):
        found["server"] += open_entries(path, child)
        for rank in children(child):
            found["rank"] += open_entries(path, rank)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    path = copy_project("leases", tmp_path_factory.mktemp("shared"))
    (path / "leases").mkdir(mode=0o700)
    command = [sys.executable, "-m", "pytest", *arguments(path, "test_hangs.py")]
    quiet = subprocess.DEVNULL
    killed = subprocess.Popen(command, cwd=path, env=environment(path), stdout=quiet, stderr=quiet)
    with ThreadPoolExecutor() as executor:
        try:
            wait_for(
                lambda: list(path.glob("leases/*.lease")),
                "the first run has leased all four ranks",
                seconds=120,
            )
            patient = executor.submit(run, path, "test_patient.py")
            wait_for(
                lambda: len(list(path.glob("hangs-*"))) == 4,
                "all ranks of the first run are in the test",
                seconds=120,
            )
            descriptors = describe(path, killed.pid)
            wait_for(lambda: list(path.glob("leases/*.turn")), "the second run waits in line")
        finally:
            killed.kill()
            killed_at = time.monotonic()
            killed.wait()
        wait_for(lambda: (path / "four.txt").exists(), "the second run has got the ranks")
        many = run(path, "-n", "2", "test_many.py")
    # Ranks that are killed do not note their end.
    lines = [line.split() for line in (path / "ranks.txt").read_text().splitlines()]
    events = [(float(at), int(what)) for at, what in lines]
    died = [what for at, what in events if at < killed_at].count(1)
    with (path / "ranks.txt").open("a") as file:
        file.write(f"{killed_at} -1\n" * died)
    return Shared(path, killed.pid, descriptors, patient.result(), many)


def test_no_more_ranks_live_than_may_run_at_once(shared: Shared) -> None:
    lines = [line.split() for line in (shared.path / "ranks.txt").read_text().splitlines()]
    alive, most = 0, 0
    for _, what in sorted((float(at), int(what)) for at, what in lines):
        alive += what
        most = max(most, alive)
    assert (most, alive) == (4, 0)


def test_runs_that_share_ranks_run_all_their_tests(shared: Shared) -> None:
    assert re.search(r"3 passed in", shared.patient), shared.patient
    assert re.search(r"8 passed, [12] warnings?, 1 error in", shared.many), shared.many


def test_the_ranks_of_a_killed_controller_are_free(shared: Shared) -> None:
    line = f"waiting for 4 of the 4 ranks that may run at once (ranks_at_once), held by pid {shared.killed}"
    assert f"{line} in {shared.path} (4 ranks)" in shared.patient


def test_a_worker_of_pytest_n_that_waited_says_so_once(shared: Shared) -> None:
    workers = re.findall(r"(gw\d) spent a long time waiting for [123] of the 4 ranks", shared.many)
    assert workers
    assert len(workers) == len(set(workers))


def test_a_warm_world_gives_its_ranks_up_for_another_run(shared: Shared) -> None:
    pids = (shared.path / "four.txt").read_text().split()
    assert len(pids) == 8
    assert set(pids[:4]).isdisjoint(pids[4:])


def test_only_ranks_hold_a_lease(shared: Shared) -> None:
    assert shared.descriptors == {"controller": [], "server": [], "rank": [".lease"] * 4}


def test_a_world_larger_than_the_bound_is_refused_with_a_remedy(shared: Shared) -> None:
    assert (
        f"a world of 5 ranks is larger than `ranks_at_once = 4` in {shared.path}/pytest.ini: "
        "set ranks_at_once to 5 or more, or mark the test for fewer ranks"
    ) in shared.many


def test_nothing_of_ended_leases_is_left(shared: Shared) -> None:
    assert [entry.name for entry in (shared.path / "leases").iterdir()] == ["mutex"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ranks_at_once = 0", "ranks_at_once = 0: write a whole number above 0"),
        ("ranks_at_once = many", "ranks_at_once: write a whole number above 0 (invalid literal"),
        ("ranks_wait = -1", "ranks_wait = -1.0: write a number of seconds above 0"),
        ("ranks_wait = nan", "ranks_wait = nan: write a number of seconds above 0"),
        ("ranks_wait = long", "ranks_wait: write a number of seconds above 0 (could not convert"),
    ],
)
def test_invalid_numbers_are_refused(pytester: pytest.Pytester, line: str, message: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        pytester.parseconfigure()
