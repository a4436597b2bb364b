"""Leases: how many ranks run at once on a machine, over several runs of pytest that share it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


def until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait for something another process does; the bound is for a machine that is busy with other things."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.01)


# Three runs at once that share four places: one is killed, one is patient, one has two controllers.

CONFTEST = """
import os, time
import harness.launch.leases
harness.launch.leases.SAY_AFTER = 0

def note(what):
    with open("ranks.txt", "a") as file:
        file.write(f"{time.monotonic()} {what}\\n")

def pytest_sessionstart():
    if "RANK" in os.environ:
        note(1)

def pytest_sessionfinish():
    if "RANK" in os.environ:
        note(-1)
"""
HANGS = """
import pathlib, pytest, time

@pytest.mark.ranks(4)
def test_hangs(world):
    pathlib.Path(f"hangs-{world.rank}.txt").touch()
    time.sleep(600)
"""
PATIENT = """
import os, pathlib, pytest, time

@pytest.mark.ranks(4)
def test_of_four(world):
    pathlib.Path("four.txt").open("a").write(f"{os.getpid()}\\n")

def test_that_waits_for_another_run():
    deadline = time.monotonic() + 120
    while not pathlib.Path("many.txt").exists():
        assert time.monotonic() < deadline, "the world that this run keeps warm blocks the other run"
        time.sleep(0.01)

@pytest.mark.ranks(4)
def test_of_four_again(world):
    pathlib.Path("four.txt").open("a").write(f"{os.getpid()}\\n")
"""
MANY = """
import pathlib, pytest, time

@pytest.mark.parametrize("turn", range(2))
@pytest.mark.ranks(1, 2, 3)
def test_marked(world, turn):
    time.sleep(0.02)
    pathlib.Path("many.txt").touch()

@pytest.mark.parametrize("turn", range(2))
def test_plain(turn):
    time.sleep(0.02)

@pytest.mark.ranks(5)
def test_too_large(world): pass
"""


@dataclass(frozen=True)
class Shared:
    """What three runs that shared four places left behind."""

    path: Path
    killed: int
    descriptors: dict[str, list[str]]
    """By the role of a process of the run that was killed: its open files in the ledger."""
    patient: str
    many: str


def start(path: Path, *args: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environ["LOCKSTEP_LEASES"] = str(path / "leases")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={path}/tmp-{args[-1]}"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *args], cwd=path, env=environ, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def open_entries(path: Path, pid: int) -> list[str]:
    """Return which files of the ledger a process has open."""
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
    path = tmp_path_factory.mktemp("shared")
    files = {"conftest": CONFTEST, "test_hangs": HANGS, "test_patient": PATIENT, "test_many": MANY}
    for name, text in files.items():
        (path / f"{name}.py").write_text(text)
    (path / "pytest.ini").write_text("[pytest]\nranks_preload =\nranks_at_once = 4\n")
    (path / "leases").mkdir(mode=0o700)
    runs = [start(path, "test_hangs.py")]
    try:
        until(lambda: list(path.glob("leases/*.lease")), "the first run has leased all four places")
        runs.append(start(path, "test_patient.py"))
        until(lambda: len(list(path.glob("hangs-*"))) == 4, "all ranks of the first run are in the test")
        descriptors = describe(path, runs[0].pid)
        until(lambda: list(path.glob("leases/*.turn")), "the second run waits in line")
        runs[0].kill()
        killed_at = time.monotonic()
        until(lambda: (path / "four.txt").exists(), "the second run has got the places")
        runs.append(start(path, "-n", "2", "test_many.py"))
        patient, many = (run.communicate(timeout=240)[0] for run in runs[1:])
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    # Ranks that are killed do not note their end.
    lines = [line.split() for line in (path / "ranks.txt").read_text().splitlines()]
    events = [(float(at), int(what)) for at, what in lines]
    died = [what for at, what in events if at < killed_at].count(1)
    with (path / "ranks.txt").open("a") as file:
        file.write(f"{killed_at} -1\n" * died)
    return Shared(path, runs[0].pid, descriptors, patient, many)


def test_never_do_more_ranks_live_than_may_run_at_once(shared: Shared) -> None:
    lines = [line.split() for line in (shared.path / "ranks.txt").read_text().splitlines()]
    alive, most = 0, 0
    for _, what in sorted((float(at), int(what)) for at, what in lines):
        alive += what
        most = max(most, alive)
    assert (most, alive) == (4, 0)


def test_runs_that_share_places_end_with_all_tests_run(shared: Shared) -> None:
    assert re.search(r"3 passed in", shared.patient), shared.patient
    assert re.search(r"8 passed, [12] warnings?, 1 error in", shared.many), shared.many


def test_the_places_of_a_controller_that_was_killed_are_free_for_who_waits(shared: Shared) -> None:
    told = f"waiting for 4 of the 4 ranks that may run at once (ranks_at_once), held by pid {shared.killed}"
    assert f"{told} in {shared.path} (4 ranks)" in shared.patient


def test_a_process_of_pytest_n_that_waited_says_so_once(shared: Shared) -> None:
    told = re.findall(r"(gw\d) spent a long time waiting for [123] of the 4 ranks", shared.many)
    assert told
    assert len(told) == len(set(told))


def test_a_world_gives_way_during_a_test_that_needs_none_and_is_made_anew(shared: Shared) -> None:
    pids = (shared.path / "four.txt").read_text().split()
    assert len(pids) == 8
    assert set(pids[:4]).isdisjoint(pids[4:])


def test_ranks_hold_a_lease_and_neither_their_controller_nor_the_server_does(shared: Shared) -> None:
    assert shared.descriptors == {"controller": [], "server": [], "rank": [".lease"] * 4}


def test_a_world_larger_than_the_bound_is_refused_with_what_to_do(shared: Shared) -> None:
    assert (
        f"a world of 5 ranks is larger than `ranks_at_once = 4` in {shared.path}/pytest.ini: "
        "set ranks_at_once to 5 or more, or mark the test for fewer ranks"
    ) in shared.many


def test_nothing_of_leases_that_have_ended_is_left(shared: Shared) -> None:
    assert [entry.name for entry in (shared.path / "leases").iterdir()] == ["mutex"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ranks_at_once = 0", "ranks_at_once = 0: write a whole number above 0"),
        ("ranks_at_once = many", "ranks_at_once: write a whole number above 0 (invalid literal"),
        ("ranks_wait = -1", "ranks_wait = -1.0: write a number of seconds above 0"),
        ("ranks_wait = nan", "ranks_wait = nan: write a number of seconds above 0"),
        ("ranks_wait = long", "ranks_wait: write a number of seconds above 0 (could not convert"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(pytester: pytest.Pytester, line: str, told: str) -> None:
    pytester.makeini(f"[pytest]\n{line}\n")
    with pytest.raises(pytest.UsageError, match=re.escape(told)):
        pytester.parseconfigure()
