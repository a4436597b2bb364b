"""State of a rank: what counts, how changes are described, and what is restored."""

from __future__ import annotations

import faulthandler
import gc
import locale
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy
import pytest
import torch

from lockstep.rank import state as module
from lockstep.rank.state import CrashReports, InterpreterState, RankState, Snapshot, seed_everything
from lockstep.rank.torch_internals import set_cudnn_flags
from suites.selftest.project import Project

# As `torch.testing._internal.common_utils` does when it is imported: from then on flags of
# `torch.backends` cannot be assigned, for good.
FROZEN = """
import os, torch

torch.backends.disable_global_flags()


def test_touches_the_environment(world):
    os.environ["LEFT"] = "1"


def test_calls_set_flags(world):
    assert "LEFT" not in os.environ
    torch.backends.cudnn.set_flags(_benchmark=True, _deterministic=True)


def test_sees_nothing_of_it(world):
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.deterministic
"""


def test_flags_that_cannot_be_assigned_are_restored(project: Project) -> None:
    project.write(FROZEN)
    output = project.run()
    assert "3 passed, 2 warnings" in output
    assert "test left behind environ: LEFT" in output
    assert "test left behind cudnn flags: (True, True) (was (False, False))" in output


@pytest.mark.parametrize("name", ["PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"])
def test_what_pytest_and_torch_set_by_themselves_is_no_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = RankState.capture().environ
    monkeypatch.setenv(name, "set in a test")
    monkeypatch.setenv("OF_A_USER", "set in a test")
    assert {*RankState.capture().environ} - {*before} == {os.fsencode("OF_A_USER")}


def test_a_group_that_is_gone_after_a_failure_is_not_reported(project: Project) -> None:
    """The harness aborts the groups of a rank that fails, and torch forgets those of nccl."""
    project.write("""
import torch.distributed as dist

def test_fails(world):
    dist.destroy_process_group()
    assert False

def test_after(world):
    world.barrier()
""")
    output = project.run()
    assert "1 failed, 1 passed in" in output
    assert "left behind" not in output


def test_what_a_file_changes_as_it_is_imported_stands(project: Project) -> None:
    project.write("""
import os
os.environ["OF_A_FILE"] = "1"

def test_first(world):
    os.environ["OF_A_TEST"] = "1"

def test_second(world):
    assert os.environ["OF_A_FILE"] == "1"
    assert "OF_A_TEST" not in os.environ
""")
    output = project.run()
    assert "2 passed, 1 warning" in output
    assert "the test left behind environ: OF_A_TEST\n" in output


# In this process


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankState]:
    """The state of this process, which has it again after the test."""
    # The public function imports torch's compiler, which takes seconds.
    monkeypatch.setattr(torch, "use_deterministic_algorithms", torch._C._set_deterministic_algorithms)
    of_timeout = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest-timeout's
    before = RankState.capture()
    yield before
    before.restore()
    signal.setitimer(signal.ITIMER_REAL, *of_timeout)


def lower_limit(by: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - by, hard))


NUM_THREADS, RECURSION = torch.get_num_threads(), sys.getrecursionlimit()
LAST = [place for place in sys.path if "setuptools" not in place and sys.path.count(place) == 1][-1]
CHANGES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        "default dtype: torch.float64 (was torch.float32)",
    ),
    "device": (lambda: torch.set_default_device("meta"), "default device: meta (was cpu)"),
    "grad": (lambda: torch.set_grad_enabled(False), "grad mode: False (was True)"),
    "deterministic": (
        lambda: torch._C._set_deterministic_algorithms(True, warn_only=True),
        "deterministic algorithms: (True, True) (was (False, False))",
    ),
    "errors": (
        lambda: torch._C._set_deterministic_algorithms(True, warn_only=False),
        "deterministic algorithms: (True, False) (was (False, False))",
    ),
    "cudnn": (lambda: set_cudnn_flags(True, False), "cudnn flags: (True, False) (was (False, False))"),
    "benchmark": (lambda: set_cudnn_flags(False, True), "cudnn flags: (False, True) (was (False, False))"),
    "threads": (
        lambda: torch.set_num_threads(NUM_THREADS + 1),
        f"num threads: {NUM_THREADS + 1} (was {NUM_THREADS})",
    ),
    "cwd": (lambda: os.chdir("/"), f"cwd: / (was {os.getcwd()})"),
    "environ": (lambda: os.environ.update(B="2", A="1"), "environ: A, B"),
    "path": (lambda: os.environ.pop("PATH"), "environ: PATH"),
    "handler": (
        lambda: signal.signal(signal.SIGHUP, signal.default_int_handler),  # nohup has it ignored
        "signal handlers: SIGHUP",
    ),
    "blocked": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
        f"blocked signals: {signal.SIGUSR2.value}",
    ),
    "alarm": (lambda: signal.setitimer(signal.ITIMER_REAL, 1000), "pending alarm: True (was False)"),
    "soon": (lambda: signal.setitimer(signal.ITIMER_REAL, 0.9), "pending alarm: True (was False)"),
    "gc": (gc.disable, "garbage collection: False (was True)"),
    "recursion": (
        lambda: sys.setrecursionlimit(RECURSION + 7),
        f"recursion limit: {RECURSION + 7} (was {RECURSION})",
    ),
    "added": (lambda: sys.path.append("/added"), "sys path: /added added"),
    "removed": (lambda: sys.path.remove(LAST), f"sys path: {LAST} removed"),
    "umask": (lambda: os.umask(0o124), "umask: 0o124 (was "),
    "limit": (lambda: lower_limit(1), "resource limits: RLIMIT_NOFILE"),
    "locale": (lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"), "locale: "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_described_and_restored(state: RankState, name: str) -> None:
    change, line = CHANGES[name]
    assert state.changes(state) == []
    change()
    lines = state.changes(RankState.capture())
    assert len(lines) == 1
    assert lines[0].startswith(line)
    state.restore()
    assert RankState.capture() == state
    assert os.environ["PATH"]


def test_a_default_device_other_than_the_cpu_is_restored(state: RankState) -> None:
    torch.set_default_device("meta")
    before = RankState.capture()
    torch.set_default_device("cpu")
    before.restore()
    assert torch.get_default_device().type == "meta"
    state.restore()
    assert torch.get_default_device().type == "cpu"
    assert torch.overrides._get_current_function_mode_stack() == []


def test_garbage_collection_that_was_off_is_off_again(state: RankState) -> None:
    gc.disable()
    before = InterpreterState.capture()
    gc.enable()
    before.restore()
    assert not gc.isenabled()


def test_what_is_as_it_was_is_not_set_again(state: RankState, monkeypatch: pytest.MonkeyPatch) -> None:
    setters = {
        (torch, "set_default_device"): Mock(),
        (torch, "use_deterministic_algorithms"): Mock(),
        (torch, "set_num_threads"): Mock(),
        (os, "chdir"): Mock(),
        (InterpreterState, "restore"): Mock(),
    }
    with monkeypatch.context() as patch:
        for (owner, name), mock in setters.items():
            patch.setattr(owner, name, mock)
        state.restore()
    assert [name for (_, name), mock in setters.items() if mock.called] == []


def test_an_alarm_of_before_is_left_to_come(state: RankState) -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000)
    before = InterpreterState.capture()
    gc.disable()
    before.restore()
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


def test_a_handler_that_python_does_not_know_is_left(state: RankState) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = {"SIGHUP": None}
    replace(state.interpreter, signal_handlers=handlers).restore()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_limits_are_raised_as_far_as_they_may_be(state: RankState, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict.fromkeys(module._LIMITS.values(), (5, 10))
    tried = []

    def set_limit(limit: int, wanted: tuple[int, int]) -> None:
        tried.append(wanted)
        if wanted[1] > limits[limit][1] or wanted[1] == 1:
            raise ValueError("not allowed to raise maximum limit")
        limits[limit] = wanted

    name, number = next(iter(module._LIMITS.items()))
    patched = SimpleNamespace(getrlimit=limits.__getitem__, setrlimit=set_limit)
    monkeypatch.setattr(module, "resource", patched)
    as_now = dict.fromkeys(module._LIMITS, (5, 10))
    replace(state.interpreter, resource_limits=as_now).restore()
    assert tried == []
    replace(state.interpreter, resource_limits={**as_now, name: (8, 20)}).restore()
    assert tried == [(8, 20), (10, 10)]
    assert limits[number] == (10, 10)
    limits[number] = (1, 1)
    replace(state.interpreter, resource_limits={name: (8, 20)}).restore()
    assert limits[number] == (1, 1)


def test_paths_of_setuptools_are_no_state_and_stay(state: RankState) -> None:
    sys.path[:] = ["/a", "/setuptools/_vendor", "/b"]
    before = InterpreterState.capture()
    assert before.sys_path == ("/a", "/b")
    sys.path.remove("/a")
    before.restore()
    assert sys.path == ["/a", "/b", "/setuptools/_vendor"]


def test_a_directory_that_was_removed_has_no_path(
    state: RankState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert RankState.capture().cwd == "(removed)"


def test_variables_of_pytest_and_torch_are_left_as_they_are(
    state: RankState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/of/a/compiler")
    state.restore()
    assert os.environ["TRITON_PTXAS_PATH"] == "/of/a/compiler"
    assert "PYTEST_CURRENT_TEST" in os.environ


# Snapshots


@dataclass(frozen=True, slots=True)
class Inner(Snapshot):
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Outer(Snapshot):
    of_keys: dict[str, int]
    a_number: int = 0
    inner: Inner = Inner()


def test_changes_are_folded_into_another_state_item_by_item() -> None:
    state = Outer({"kept": 1, "both": 1, "gone": 1}, 7, Inner(frozenset({"kept", "gone"})))
    before = Outer({"gone": 1, "both": 2, "same": 4}, 1, Inner(frozenset({"gone", "same"})))
    now = Outer({"new": 5, "both": 3, "same": 4}, 2, Inner(frozenset({"new", "same"})))
    expected = Outer({"kept": 1, "both": 3, "new": 5}, 2, Inner(frozenset({"kept", "new"})))
    assert state.with_changes(before, now) == expected
    assert state.with_changes(before, before) == state


def test_changes_are_lines_in_the_order_of_the_fields() -> None:
    before = Outer({"b": 1, "a": 1, "same": 1}, 1)
    now = Outer({"b": 2, "c": 1, "same": 1}, 2, Inner(frozenset({"name"})))
    lines = ["of keys: a, b, c", "a number: 2 (was 1)", "1 process group(s)"]
    assert before.changes(now) == lines
    assert before.changes(before) == []
    assert before.changes(replace(before, inner=Inner(frozenset({"mesh_dp 1"})))) == []


def test_a_look_at_the_state_leaves_the_mask_of_files(state: RankState) -> None:
    os.umask(0o124)
    RankState.capture()
    assert os.umask(0) == 0o124


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({"default_pg 0", "own 1"}, {"default_pg 0", "own 1", "a 2", "b 3"}, "2 process group(s)"),
        ({"default_pg 0"}, {"default_pg 0", "mesh_dp 1"}, ""),
        ({"default_pg 0"}, {"default_pg 0", "mesh_dp 1", "a 2"}, "1 process group(s)"),
        ({"a 1"}, set(), ""),
        ({"a 1", "default_pg 0"}, {"a 1"}, "no default process group (the next test gets a new world)"),
    ],
)
def test_groups_are_counted_but_for_those_of_meshes(before: set[str], after: set[str], line: str) -> None:
    assert module._describe("process groups", frozenset(before), frozenset(after)) == line


def test_paths_and_locales_are_described_by_what_differs() -> None:
    described = module._describe("sys path", ("/a", "/b", "/c"), ("/c", "/d", "/e"))
    assert described == "sys path: /d added, /e added, /a removed, /b removed"
    assert module._describe("sys path", ("/a", "/b"), ("/b", "/a")) == ""
    assert module._describe("other", (1, 2), (2, 1)) == "other: (2, 1) (was (1, 2))"
    before, after = "LC_CTYPE=C;LC_TIME=C;LC_NAME=C", "LC_CTYPE=C;LC_TIME=de;LC_NAME=de"
    assert module._describe("locale", before, after) == "locale: LC_NAME=de; LC_TIME=de"
    assert module._describe("cwd", before, "/") == f"cwd: / (was {before})"


# Groups


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The groups that torch knows, the default one first; a group that ends is not in it any more."""
    names = (("default_pg", 0, "gloo"), ("a", 1, "shm"), ("b", 2, "gloo"))
    found = [SimpleNamespace(group_desc=desc, group_name=name, backend=of) for desc, name, of in names]

    def process_groups() -> list[Any]:
        assert found, "torch has no groups before it is initialized"
        return list(found)

    def destroy(group: object = None) -> None:
        found[:] = [] if group is None else [each for each in found if each is not group]

    dist = SimpleNamespace(
        group=SimpleNamespace(WORLD=found[0]),
        is_initialized=lambda: bool(found),
        destroy_process_group=destroy,
        get_backend=lambda group: group.backend,
    )
    monkeypatch.setattr(module, "dist", dist)
    monkeypatch.setattr(module, "process_groups", process_groups)
    return found


def test_groups_that_are_not_of_the_state_end(groups: list[Any]) -> None:
    default, first, second = groups
    assert RankState.capture().process_groups == {"default_pg 0", "a 1", "b 2"}
    groups.remove(second)
    state = RankState.capture()
    groups.append(second)
    assert state.end_groups() == [second]
    assert groups == [default, first]
    assert replace(state, process_groups=frozenset({"default_pg 0"})).end_groups() == []
    assert groups == [default]
    groups.clear()
    assert RankState.capture().process_groups == set()
    assert state.end_groups() == []


def test_all_groups_end_with_a_default_one_of_a_test(groups: list[Any]) -> None:
    state = replace(RankState.capture(), process_groups=frozenset())
    destroy = Mock(side_effect=module.dist.destroy_process_group)
    module.dist.destroy_process_group = destroy
    state.end_groups()
    assert groups == []
    assert destroy.call_args_list == [call()]


# Crash reports and seeds


def test_stacks_go_to_a_file_and_crashes_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "stacks"
    path.write_text("of an earlier rank")
    reports = CrashReports(str(path))
    assert path.read_text() == ""
    mock = Mock(spec=faulthandler)
    mock.is_enabled.side_effect = [True, False]
    monkeypatch.setattr(module, "faulthandler", mock)
    try:
        both = [
            call.unregister(signal.SIGUSR1),
            call.register(signal.SIGUSR1, file=reports._stacks, all_threads=True),
            call.is_enabled(),
        ]
        reports.enable()
        assert mock.mock_calls == both
        reports.enable()
        assert mock.mock_calls == [*both, *both, call.enable(file=reports._stderr)]
        assert os.path.samestat(os.fstat(reports._stacks), path.stat())
        assert os.path.samestat(os.fstat(reports._stderr), os.fstat(2))
        os.write(reports._stacks, b"stacks")
        assert path.read_text() == "stacks"
    finally:
        os.close(reports._stacks)
        os.close(reports._stderr)
    new = tmp_path / "new"
    other = CrashReports(str(new))
    assert new.stat().st_mode & 0o777 == 0o600
    os.close(other._stacks)
    os.close(other._stderr)


def test_every_generator_of_a_rank_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[tuple[str, int]] = []
    device = Mock(side_effect=lambda kind: SimpleNamespace(seed=lambda seed: seeded.append((kind, seed))))
    monkeypatch.setattr(module, "Device", device)

    def numbers() -> tuple[float, float, int]:
        return random.random(), float(numpy.random.rand()), int(torch.randint(2**62, (1,)))

    seed_everything(3, torch.device("cpu"))
    first = numbers()
    assert (random.Random(3).random(), numpy.random.RandomState(3).rand()) == first[:2]
    seed_everything(4 + 2**32, torch.device("cuda", 1))
    second = numbers()
    assert (random.Random(4 + 2**32).random(), numpy.random.RandomState(4).rand()) == second[:2]
    assert second[2] != first[2]
    assert torch.initial_seed() == 4 + 2**32
    assert seeded == [("cuda", 4 + 2**32)]
