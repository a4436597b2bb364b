"""Leases of the ranks and GPUs of a machine, and the order of those who wait: the store, without ranks."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.backends.device import Device
from lockstep.exceptions import LaunchError
from lockstep.features.leases import lease_store
from lockstep.features.leases import leases as leases_module
from lockstep.features.leases.lease_store import LeaseStore, Requirement, ResourceRequest, default_directory
from lockstep.features.leases.leases import Lease, Leases
from lockstep.launch.bootstrap import hold
from lockstep.specification import WorldKey
from suites.selftest.project import PROJECTS, wait_for

# One line for all


class Machine:
    """A lease store, and controllers that take leases from it with the patience that a test gives them."""

    def __init__(self, path: Path) -> None:
        self.store = LeaseStore(path / "leases")

    def take(self, need: Requirement, patience: float = 0.0) -> Lease:
        return Leases(self.store, patience, print).take(need, lambda: None)

    def waits(self, need: Requirement) -> threading.Thread:
        """Put a world in line, which gives its lease up as soon as it has it; return once it stands there."""
        thread = threading.Thread(target=self._wait, args=(need,), daemon=True)
        before = len(list(self.store.waiting()))
        thread.start()
        wait_for(lambda: len(list(self.store.waiting())) > before, "a world stands in line")
        return thread

    def _wait(self, need: Requirement) -> None:
        with contextlib.suppress(LaunchError):  # the test has failed, and is reported elsewhere
            self.take(need, patience=60).end()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def ranks(number: int, *, at_once: int = 4) -> Requirement:
    return Requirement(ResourceRequest(os.getpid(), "/here", number), number, at_once)


def gpus(number: int, names: str, *, exclusive: bool = True) -> Requirement:
    return Requirement(ResourceRequest(os.getpid(), "/here", 0, tuple(names), exclusive), number)


def controllers(machine: Machine, number: int, *args: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, str(PROJECTS / "lease_holder.py"), str(machine.store.directory), *args]
    return [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(number)]


def times(started: list[subprocess.Popen[str]]) -> list[tuple[str, float, float]]:
    """Return who had which GPU from when to when, in order of time."""
    lines = [line.split() for process in started for line in process.communicate(timeout=180)[0].splitlines()]
    return sorted((gpu, float(line[-2]), float(line[-1])) for line in lines for gpu in line[:-2])


@pytest.mark.parametrize("names", ["01", "01234567"])
def test_four_controllers_with_worlds_of_two_never_share_a_gpu(machine: Machine, names: str) -> None:
    had = times(controllers(machine, 4, names, "5", "0.01"))
    assert len(had) == 4 * 5 * 2
    for (gpu, _, end), (following, begun, _) in itertools.pairwise(had):
        assert gpu != following or end <= begun


def test_a_gpu_of_a_killed_controller_is_free(machine: Machine) -> None:
    [holder] = controllers(machine, 1, "01", "1", "600")
    try:
        assert holder.stdout
        assert holder.stdout.read(3) == "0 1"
        with pytest.raises(LaunchError, match="2 of the GPUs 0, 1"):
            machine.take(gpus(2, "01"))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert machine.take(gpus(2, "01")).gpus == ("0", "1")


def test_a_lease_lasts_as_long_as_a_rank_lives_and_no_longer(machine: Machine) -> None:
    lease = machine.take(ranks(4))
    rank = hold(lease.held)
    lease.leave_to_ranks()
    lease.end()
    with pytest.raises(LaunchError):
        machine.take(ranks(1))
    os.close(rank)
    assert machine.take(ranks(4)).rest()


def test_waiting_too_long_is_an_error_that_names_the_holders(machine: Machine) -> None:
    held = machine.take(ranks(3))
    line = machine.waits(ranks(4))
    with pytest.raises(LaunchError) as caught:
        machine.take(ranks(1))
    mine = f"pid {os.getpid()} in /here"
    assert str(caught.value) == (
        "waited 0 s for 1 of the 4 ranks that may run at once (ranks_at_once), held by "
        f"{mine} (3 ranks); before it in line: {mine} (4 ranks). End these runs, or wait longer: the ini "
        "option ranks_wait has the seconds"
    )
    held.end()
    line.join(60)
    assert [entry.name for entry in machine.store.directory.iterdir()] == ["mutex"]


def test_a_requirement_names_the_ranks_and_gpus_that_are_missing() -> None:
    both = Requirement(ResourceRequest(1, "/here", 2, ("0", "1"), True), 2, 4)
    of_ranks = "2 of the 4 ranks that may run at once (ranks_at_once)"
    assert str(both) == f"{of_ranks} and 2 of the GPUs 0, 1"
    assert str(gpus(2, "012", exclusive=False)) == "1 of the GPUs 0, 1, 2"
    assert str(ranks(2)) == of_ranks
    assert str(both.request) == "pid 1 in /here (2 ranks; GPU 0, 1)"
    assert str(ranks(1).request) == f"pid {os.getpid()} in /here (1 rank)"


def test_a_long_wait_is_reported_once_a_minute(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = {"is": 0.0}, list[str]()

    def sleep(seconds: float) -> None:
        now["is"] += 2.5

    clock = SimpleNamespace(monotonic=lambda: now["is"], time=lambda: 0.0, sleep=sleep)
    held = machine.take(ranks(4))
    waiting = Leases(machine.store, 70.0, lambda text: said.append(f"{now['is']}: {text}"))
    monkeypatch.setattr(leases_module, "time", clock)
    with pytest.raises(LaunchError, match=r"^waited 72 s for 1 of the 4 ranks"):
        waiting.take(ranks(1), lambda: None)
    text = f"waiting for {ranks(1)}, held by {ranks(4).request}"
    assert said == [f"7.5: {text}", f"70.0: {text}"]
    held.end()


def test_a_wait_is_said_on_the_terminal_or_once_among_the_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    terminal = SimpleNamespace(
        ensure_newline=lambda: said.append("newline"),
        write_line=said.append,
        flush=lambda: said.append("flush"),
    )
    recorded = SimpleNamespace(call_historic=lambda kwargs: said.append(kwargs))
    config: Any = SimpleNamespace(
        pluginmanager=SimpleNamespace(get_plugin={"terminalreporter": terminal}.get),
        stash=pytest.Stash(),
        inipath=None,
        rootpath="/root",
        hook=SimpleNamespace(pytest_warning_recorded=recorded),
    )
    leases_module._report(config, "waiting")
    assert said == ["newline", "waiting", "flush"]
    said.clear()
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw2")
    config.workerinput = {}
    for _ in range(2):
        leases_module._report(config, "waiting")
    (given,) = said
    message = given.pop("warning_message")
    assert (str(message.message), message.category, message.filename, message.lineno) == (
        "gw2 spent a long time waiting",
        UserWarning,
        "/root",
        1,
    )
    assert given == {"when": "runtest", "nodeid": "", "location": None}


def test_small_worlds_do_not_overtake_a_large_one(
    machine: Machine,
) -> None:
    held = [machine.take(ranks(2)), machine.take(gpus(1, "0"))]
    large, single = machine.waits(ranks(4)), machine.waits(gpus(2, "01"))
    for small in (ranks(1), gpus(1, "1")):
        with pytest.raises(LaunchError, match="before it in line"):
            machine.take(small)
    assert machine.take(gpus(1, "2")).gpus == ("2",)
    for lease in held:
        lease.end()
    large.join(60)
    single.join(60)
    assert machine.take(ranks(1)).gpus == ()


def test_a_lower_bound_counts_ranks_of_runs_with_a_higher_one(machine: Machine) -> None:
    machine.take(ranks(5, at_once=8))
    with pytest.raises(LaunchError):
        machine.take(ranks(1, at_once=4))
    assert machine.take(ranks(3, at_once=8)).rest()


def test_a_controller_ends_its_own_worlds_before_it_waits(machine: Machine) -> None:
    worlds = [machine.take(ranks(3))]

    def make_room() -> None:
        worlds.pop().end()

    leases = Leases(machine.store, 0.0, print)
    leases.take(ranks(1), make_room).end()
    assert len(worlds) == 1
    leases.take(ranks(2), make_room).end()
    assert worlds == []


def test_a_warm_world_is_recalled_when_it_was_idle_for_a_while(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, busy = machine.take(ranks(2)), machine.take(ranks(2))
    assert warm.rest()
    with pytest.raises(LaunchError):
        machine.take(ranks(1))
    assert warm.resume()
    monkeypatch.setattr(leases_module, "RECALL_AFTER", -1.0)
    assert warm.rest()
    with pytest.raises(LaunchError):
        machine.take(ranks(1))
    assert not warm.resume()
    assert busy.rest()
    assert busy.resume()


def test_only_as_many_idle_worlds_are_recalled_as_are_needed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases_module, "RECALL_AFTER", -1.0)
    idle = [machine.take(ranks(1)) for _ in range(4)]
    for age, lease in enumerate(idle):
        assert lease.rest()
        os.utime(f"{lease.held.removesuffix('lease')}idle", (1000.0 - age, 1000.0 - age))
    with pytest.raises(LaunchError):
        machine.take(ranks(2))
    assert [lease.resume() for lease in idle] == [True, True, False, False]


def test_a_world_rests_until_its_turn_ends_and_another_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = machine.take(gpus(1, "0"))
    rank = hold(lease.held)
    lease.leave_to_ranks()
    line = machine.waits(gpus(1, "0"))
    assert lease.rest()
    assert lease.resume()
    monkeypatch.setattr(leases_module, "TURN_LASTS", 0.0)
    lease.leave_to_ranks()
    assert not lease.rest()
    os.close(rank)
    lease.end()
    line.join(60)
    lease = machine.take(gpus(1, "0"))
    other = machine.take(gpus(1, "1"))
    line = machine.waits(gpus(1, "1"))
    assert lease.rest()
    other.end()
    line.join(60)


# GPUs


@pytest.mark.parametrize(
    ("held", "number", "exclusive", "chosen"),
    [
        ([], 2, True, "01"),
        ([("0", True)], 2, True, "12"),
        ([("0", False)], 2, True, "12"),
        ([("01", True)], 2, True, None),
        ([("0", False), ("1", False)], 1, False, "2"),
        ([("0", False), ("12", False)], 2, False, "01"),
        ([("0", False), ("0", False), ("1", False), ("2", True)], 1, False, "1"),
        ([("12", True)], 4, False, "0"),
        ([("012", True)], 1, False, None),
        ([], 4, False, "012"),
    ],
)
def test_gpus_are_chosen_that_others_do_not_hold(
    held: list[tuple[str, bool]], number: int, exclusive: bool, chosen: str | None
) -> None:
    others = [ResourceRequest(1, "/there", 0, tuple(names), alone) for names, alone in held]
    choice = gpus(number, "012", exclusive=exclusive).choose(others)
    assert choice == (None if chosen is None else tuple(chosen))


@pytest.mark.parametrize(
    ("variable", "names"),
    [(None, ("0", "1")), ("5,GPU-8f2c", ("5", "GPU-8f2c")), (" 3 , 2,-1,7", ("3", "2"))],
)
def test_gpus_are_named_as_the_environment_names_them(
    pytestconfig: pytest.Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
    names: tuple[str, ...],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setenv("LOCKSTEP_LEASES", str(tmp_path / "leases"))
    monkeypatch.setattr(Device, "count", lambda _: 2)
    lease = leases_module.lease_for(WorldKey(2, "nccl", "cuda"), pytestconfig, lambda: None)
    assert lease.gpus == names
    [entry] = (tmp_path / "leases").glob("*.lease")
    assert json.loads(entry.read_text()) == {
        "pid": os.getpid(),
        "where": str(pytestconfig.rootpath),
        "ranks": 0,
        "gpus": list(names),
        "exclusive": True,
    }
    lease.end()


# Files that cannot be read


def write_bytes(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


REQUEST = {"pid": 7, "where": "/there", "ranks": 3, "gpus": [], "exclusive": False}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (write_bytes(b""), "it has no request"),
        (write_bytes(b"\0\xff garbage"), "invalid start byte"),
        (write_bytes(b"[" * 100_000), "it is nested too deeply"),
        (write_bytes(json.dumps({**REQUEST, "ranks": "3"}).encode()), "its `ranks` is '3'"),
        (write_bytes(json.dumps({**REQUEST, "ranks": -3}).encode()), "it is for -3 ranks and the GPUs []"),
        (write_bytes(json.dumps({"size": 3}).encode()), "its `pid` is None"),
        (os.mkfifo, "it is no regular file"),
        (os.mkdir, "it is no regular file"),
    ],
    ids=["empty", "garbage", "deep", "type", "negative", "other", "fifo", "directory"],
)
@pytest.mark.parametrize("kind", ["lease", "turn"])
def test_a_living_lease_that_cannot_be_read_is_held_and_named(
    machine: Machine, make: Callable[[Path], object], why: str, kind: str
) -> None:
    path = machine.store.path("0", kind)
    make(path)
    keeper = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.flock(keeper, fcntl.LOCK_SH)
    named = re.escape(str(path)) + rf", which cannot be read \(.*{re.escape(why)}.*\) and counts as all"
    for requirement in (ranks(1), gpus(1, "0", exclusive=False)):
        with pytest.raises(LaunchError, match=named):
            machine.take(requirement)
    assert list(machine.store.waiting()) == []
    os.close(keeper)
    machine.take(ranks(4)).end()
    assert path.is_dir() or not path.exists()


def test_a_lease_of_another_version_counts_with_what_is_known(machine: Machine) -> None:
    path = machine.store.path("0", "lease")
    path.write_text(json.dumps({**REQUEST, "memory": 5}))
    keeper = hold(str(path))
    with pytest.raises(LaunchError, match=r"held by pid 7 in /there \(3 ranks\)"):
        machine.take(ranks(2))
    machine.take(ranks(1)).end()
    os.close(keeper)


# The directory


def test_the_directory_is_made_for_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("LOCKSTEP_LEASES", raising=False)
    LeaseStore(default_directory())
    [made] = tmp_path.iterdir()
    assert (made.name, f"{made.stat().st_mode:o}") == (f"lockstep-{os.getuid()}", "40700")


def foreign(path: Path) -> Path:
    """Return a directory of another user: the root's, if we are not root ourselves."""
    if os.getuid() != 0:
        return Path("/")
    path.mkdir()
    os.chown(path, 12345, -1)
    return path


def writable(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o770)
    return path


def linked(path: Path) -> Path:
    path.symlink_to(path.parent)
    return path


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        (foreign, r"belongs to the user with id \d+, not to you \(\d+\)"),
        (writable, r"others may write in it \(its mode is 0770\)\. Remove that with `chmod go-w"),
        (linked, "it is no directory"),
        (lambda path: path / "below", "No such file or directory"),
    ],
)
def test_a_directory_that_others_can_write_in_is_refused(
    tmp_path: Path, directory: Callable[[Path], Path], reason: str
) -> None:
    with pytest.raises(LaunchError, match=f"cannot keep leases in .*{reason}.*LOCKSTEP_LEASES"):
        LeaseStore(directory(tmp_path / "leases"))


def test_a_store_that_a_stopped_process_locks_is_an_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_store, "LOCK_WITHIN", 0.0)
    reason = r"mutex locked for 0 s.*is one of your pytest runs stopped\?"
    with machine.store.locked(), pytest.raises(LaunchError, match=reason):
        machine.take(ranks(1))


def test_a_directory_that_is_removed_ends_no_run(machine: Machine) -> None:
    lease = machine.take(ranks(1))
    assert lease.rest()
    shutil.rmtree(machine.store.directory)
    assert not lease.resume()
    assert not lease.rest()
    lease.end()
    with pytest.raises(LaunchError, match=r"cannot keep leases in .*No such file"):
        machine.take(ranks(1))
