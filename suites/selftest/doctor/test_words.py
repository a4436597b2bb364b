"""The levels of findings at their bounds, their words, and the report of them."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from lockstep.doctor import command, installation, machine, trial
from lockstep.doctor.configuration import Configuration
from lockstep.doctor.finding import MIB, Finding, note, ok, problem

Patch = pytest.MonkeyPatch
NOTHING = Configuration(None, {})
TORCH = {"version": "2.13.0", "cuda": None, "hip": None, "distributed": True, "gpus": []}


@pytest.mark.parametrize(
    ("free", "level"),
    [(64 * MIB - 1, "problem"), (64 * MIB, "note"), (1024 * MIB - 1, "note"), (1024 * MIB, "ok")],
)
def test_space_in_the_temporary_directory_has_bounds(free: int, level: str, monkeypatch: Patch) -> None:
    mounted = SimpleNamespace(f_bavail=free, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: mounted)
    (found,) = machine._of_space("/x")
    assert (found.name, found.level, found.what) == ("temp-space", level, f"/x has {free // MIB} MiB free")


def test_a_file_system_with_inodes_has_one_left(monkeypatch: Patch) -> None:
    for favail, level in ((0, "problem"), (1, "ok")):
        mounted = SimpleNamespace(f_bavail=2048, f_frsize=MIB, f_files=9, f_favail=favail)
        monkeypatch.setattr(os, "statvfs", lambda path, mounted=mounted: mounted)
        assert [each.level for each in machine._of_space("/x")] == [level]


@pytest.mark.parametrize(
    ("left", "level"), [(31, "problem"), (32, "note"), (255, "note"), (256, "ok"), (None, "ok")]
)
def test_processes_have_bounds(left: int | None, level: str, monkeypatch: Patch) -> None:
    def number(path: str) -> int | None:
        if left is None or path.startswith("/sys/fs/cgroup/pids/"):
            return None
        return 1000 + left if path.endswith("/pids.max") else 1000

    monkeypatch.setattr(machine, "_number", number)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    found = machine.processes()
    assert (found.name, found.level) == ("processes", level)
    assert found.what == (
        "no limit"
        if left is None
        else f"{left} more processes and threads may start: the container may have {1000 + left}"
    )


def test_the_tightest_limit_of_processes_counts(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "_threads_of_user", lambda: 10)
    monkeypatch.setattr(machine, "_number", lambda path: 50 if path.endswith("max") else 0)
    for limit, which in ((40, "`ulimit -u` is 40"), (100, "the container may have 50")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert machine.processes().what.endswith(which)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    assert machine.processes().what.startswith("50 more")


def test_threads_are_those_of_this_user_alone(monkeypatch: Patch) -> None:
    before = machine._threads_of_user()
    assert before >= 1
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert machine._threads_of_user() < before


@pytest.mark.parametrize(
    ("cores", "quota", "words"),
    [
        (8, "max 100000", "8 cores"),
        (8, "50000 100000", "1 core"),
        (8, "250000 100000", "2 cores"),
        (3, "800000 100000", "3 cores"),
    ],
)
def test_a_container_has_a_part_of_the_cores(cores: int, quota: str, words: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(Path, "read_text", lambda path: quota)
    found = machine.processors()
    assert (found.what, found.level) == (words, "note" if words == "1 core" else "ok")


@pytest.mark.parametrize(
    ("left", "level"),
    [(768 * MIB - 1, "problem"), (768 * MIB, "note"), (1536 * MIB - 1, "note"), (1536 * MIB, "ok")],
)
def test_memory_has_bounds(left: int, level: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "MemTotal: 1 kB\nMemAvailable:  9000000 kB\n")
    monkeypatch.setattr(machine, "_number", lambda path: left + 5 if path.endswith("max") else 5)
    found = machine.memory()
    assert (found.name, found.level, found.what) == ("memory", level, f"{left // MIB} MiB can be had")


def test_memory_of_the_machine_counts_in_kib(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "_number", lambda path: None)
    monkeypatch.setattr(Path, "read_text", lambda path: "MemAvailable: 2097152 kB\n")
    assert machine.memory() == ok("memory", "2048 MiB can be had")
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    assert machine.memory() == ok("memory", "not known here")


def test_shared_memory_has_a_bound(monkeypatch: Patch) -> None:
    for free, level in ((256 * MIB - 1, "note"), (256 * MIB, "ok")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path, usage=usage: usage)
        found = machine.shared_memory()
        assert (found.level, found.what) == (level, f"/dev/shm has {free // MIB} MiB free")


@pytest.mark.parametrize(("limit", "level"), [(255, "note"), (256, "ok")])
def test_open_files_have_a_bound_and_are_counted_in_ranks(limit: int, level: str, monkeypatch: Patch) -> None:
    from lockstep.launch.limits import FILES_AT_LEAST, FILES_OF_A_RANK

    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "listdir", lambda _: ["0", "1", "2"])
    most = (limit - 3 - FILES_AT_LEAST) // FILES_OF_A_RANK
    found = machine.open_files()
    assert (found.level, found.what) == (level, f"a process may open {limit} files, enough for {most} ranks")


def test_a_python_without_a_function_of_the_kernel_is_a_problem(monkeypatch: Patch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    *_, found = machine.kernel()
    assert (found.level, found.name) == ("problem", "pidfd")
    assert found.what.endswith("a death: this Python has no such function")


def test_what_works_is_said_in_a_word(monkeypatch: Patch) -> None:
    opened: list[int] = []

    def open_memory() -> int:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[0]

    monkeypatch.setattr(machine, "_open_memory_from_a_child", open_memory)
    assert [(each.level, each.what) for each in machine.kernel()] == [
        ("ok", "`memfd_create` works"),
        ("ok", "`pidfd_open` works"),
    ]
    with pytest.raises(OSError):
        os.fstat(opened[0])
    assert machine.loopback() == ok("loopback", "127.0.0.1 can be reached")


def test_a_compiler_is_looked_for_by_its_variable(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CXX", "sh")
    found = machine.compiler()
    assert (found.level, Path(found.what).name) == ("ok", "sh")
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    assert machine.compiler() == ok("compiler", "/bin/g++")


# The installation


def test_torch_is_asked_only_where_it_is(monkeypatch: Patch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    assert installation.start_asking_torch() is None


def test_versions_are_compared_by_two_numbers() -> None:
    for version, level in (("2.11.9", "ok"), ("2.10.9", "problem"), ("2.99.0", "note")):
        found = installation.torch({**TORCH, "version": version})
        oldest = installation.OLDEST_TORCH
        is_old = installation.version_of(version) < oldest
        assert found.level == ("problem" if is_old else level)
    for version in (installation.OLDEST_TORCH, installation.NEWEST_TORCH):
        assert installation.torch({**TORCH, "version": installation._dotted(version)}).level == "ok"
    assert installation.version_of("2.13.1a0+git") == (2, 13)
    assert installation.version_of("2.x") == (2,)
    assert installation.torch({**TORCH, "hip": "6.4"}).what == "2.13.0, built for ROCm 6.4"


def test_a_gpu_is_free_with_a_tenth_of_its_memory(monkeypatch: Patch) -> None:
    gpus = [{"name": "H100", "free": free * MIB, "total": 100 * MIB} for free in (9, 10)]
    used, free = installation.gpus({"gpus": gpus})
    assert (used.name, used.level, used.what) == ("gpu-0", "note", "H100, 9 of 100 MiB free")
    assert free == ok("gpu-1", "H100, 10 of 100 MiB free")


def test_a_machine_with_a_gpu_that_torch_cannot_use_is_noted(monkeypatch: Patch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for there, cuda, level in ((True, None, "note"), (False, None, "ok"), (True, "13.0", "ok")):
        with monkeypatch.context() as patch:  # pytest asks for files, too, where this fails
            patch.setattr(Path, "exists", lambda path, there=there: there)
            (found,) = installation.gpus({**TORCH, "cuda": cuda})
        assert (found.name, found.level) == ("gpu", level)
    assert found.what == "none: tests on ranks run on the CPU"


# The trial


@pytest.mark.parametrize(
    ("inside", "level", "what"),
    [
        ("", "ok", "gloo works: two ranks, 1.50 s"),
        ('<skipped message="no GPU"/>', "note", "gloo was not tried: no GPU"),
        ('<error message="failed on setup with &quot;no&#10;&#10;route&quot;"/>', "problem", "no\nroute"),
        ("<failure>1\n2\n \n3\n4\n5\n6\n7</failure>", "problem", "1\n2\n3\n4\n5\n6"),
        ("<failure/>", "problem", "failed"),
    ],
)
def test_a_case_of_the_trial_is_a_finding(inside: str, level: str, what: str) -> None:
    case = ElementTree.fromstring(f'<testcase name="test_gloo[x]" time="1.5">{inside}</testcase>')
    found = trial._of_case(case)
    broken = f"gloo does not work on two ranks: {what}" if level == "problem" else what
    assert (found.name, found.level, found.what) == ("backend-gloo", level, broken)


def test_the_trial_of_fake_needs_no_values_of_others() -> None:
    fake, gloo = trial._test_of("fake"), trial._test_of("gloo")
    assert '(2, backend="fake", as_rank=0)' in fake
    assert "assert world.size == 2" in fake
    assert '(2, backend="gloo")' in gloo
    assert "assert tensor.tolist() == [3.0] * 4" in gloo


def test_a_pytest_that_cannot_start_is_a_problem(monkeypatch: Patch) -> None:
    given: list[object] = []

    def start(project: Configuration, plugin: str | None) -> Any:
        given.append(plugin)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "Trial", start)
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    with ExitStack() as stack:
        found: Any = command._start(stack, NOTHING, True)
        command._start(stack, NOTHING, False)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        command._start(stack, NOTHING, True)
    assert found == problem(
        "trial",
        "cannot start pytest: [Errno 28] No space left on device",
        "no test can run",
        "mend what it says",
    )
    assert given == [None, "lockstep", "lockstep"]


# The report


def run(monkeypatch: Patch, found: list[Finding], as_json: bool) -> tuple[int, str]:
    def findings(tries: bool) -> Iterator[Finding]:
        assert tries
        yield from found

    written = io.StringIO()
    monkeypatch.setattr(command, "_findings", findings)
    monkeypatch.setattr(sys, "stdout", written)
    status = command._run(argparse.Namespace(json=as_json, no_trial=False), [])
    return status, written.getvalue()


def test_the_report_lists_findings_and_sums_them_up(monkeypatch: Patch) -> None:
    found = [ok("a", "fine"), note("b", "two\nlines", "so"), problem("c", "bad", "since", "mend")]
    status, text = run(monkeypatch, found, as_json=False)
    assert status == 1
    assert text.splitlines() == [
        "ok       a: fine",
        "note     b: two",
        "          lines",
        "         why: so",
        "PROBLEM  c: bad",
        "         why: since",
        "         do:  mend",
        "",
        "problems: c; notes: 1",
    ]
    status, text = run(monkeypatch, found[:2], as_json=False)
    assert (status, text.splitlines()[-1]) == (0, "problems: none; notes: 1")


def test_the_report_in_json_has_the_status(monkeypatch: Patch) -> None:
    for found, status in (([ok("a", "fine")], 0), ([problem("c", "bad", "since", "mend")], 1)):
        given, text = run(monkeypatch, found, as_json=True)
        (each,) = found
        plain = {name: getattr(each, name) for name in ("name", "level", "what", "why", "remedy")}
        assert (given, json.loads(text)) == (status, {"status": status, "findings": [plain]})
        assert text.splitlines()[:2] == ["{", f' "status": {status},']


def test_arguments_that_doctor_does_not_know_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command._run(argparse.Namespace(json=False, no_trial=True), ["x", "--y"]) == 2
    assert capsys.readouterr().err == "python -m lockstep doctor: unknown arguments: x --y\n"


# What is looked at


class Looks:
    """Functions that find their own name, and what they were given."""

    ITERATED = ("environment", "temporary_directory", "leases", "kernel", "gpus")
    OLDEST_PYTEST = (9,)

    def __init__(self, **fixed: object) -> None:
        vars(self).update(fixed)

    def __getattr__(self, name: str) -> Any:
        def look(*given: object) -> Any:
            found = ok(name, " ".join(map(str, given)))
            return [found] if name in self.ITERATED else found

        return look


FIRST = (
    "system python registration needed:pytest (9,) needed:numpy (1,) plugins configured start_method adoption"
)
MACHINE = "processes processors memory shared_memory kernel loopback"


def names(monkeypatch: Patch, missing: str = "", tries: bool = True, **given: Any) -> tuple[str, list[Any]]:
    """Return the findings of a machine, and what was done with the process that imports torch."""
    said: list[Any] = []
    asking = SimpleNamespace(communicate=lambda: said.append("waited"), kill=lambda: said.append("killed"))
    registered = given.get("registered", ok("registration", ""))

    def start(stack: ExitStack, project: object, is_loaded: bool) -> Any:
        said.append((project, is_loaded))
        return given.get("trial")

    fixed = Looks(
        start_asking_torch=lambda: None if missing == "torch" else asking, registration=lambda: registered
    )
    monkeypatch.setattr(command, "installation", fixed)
    monkeypatch.setattr(command, "machine", Looks())
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == missing else name)
    monkeypatch.setattr(command, "configuration", lambda path: path.name)
    monkeypatch.setattr(command, "plugins", lambda: [ok("plugins", "")])
    monkeypatch.setattr(command, "configured", lambda project: [ok("configured", "")])
    for name in ("start_method", "adoption"):
        monkeypatch.setattr(command, name, lambda project, name=name: ok(name, ""))
    monkeypatch.setattr(command, "_start", start)
    found = command._findings(tries)
    return " ".join(f"needed:{each.what}" if each.name == "needed" else each.name for each in found), said


def test_all_is_looked_at_before_the_trial_is_awaited(monkeypatch: Patch) -> None:
    rest = f"environment temporary_directory compiler open_files leases {MACHINE} torch gpus"
    here = Path.cwd().name
    refused = problem("trial", "bad", "since", "mend")
    assert names(monkeypatch, trial=refused) == (
        f"{FIRST} {rest} trial",
        [(here, True), "killed", "waited"],
    )
    awaited = object.__new__(trial.Trial)
    monkeypatch.setattr(
        trial.Trial, "findings", lambda self: iter([ok("backend-gloo", ""), ok("backend-shm", "")])
    )
    unknown = problem("registration", "bad", "since", "mend")
    found, said = names(monkeypatch, trial=awaited, registered=unknown)
    assert found == f"{FIRST} {rest} backend-gloo backend-shm"
    assert said[0] == (here, False)
    assert names(monkeypatch, tries=False) == (f"{FIRST} {rest}", ["killed", "waited"])


def test_nothing_is_tried_without_torch_or_pytest(monkeypatch: Patch) -> None:
    rest = f"environment temporary_directory compiler {{}}{MACHINE} torch gpus"
    assert names(monkeypatch, "torch") == (f"{FIRST} {rest.format('open_files leases ')}", [])
    assert names(monkeypatch, "pytest") == (f"{FIRST} {rest.format('')}", ["killed", "waited"])


def test_the_command_has_its_options_in_full(monkeypatch: Patch) -> None:
    parser = argparse.ArgumentParser()
    command.add_to(parser.add_subparsers())
    given = parser.parse_args(["doctor"])
    assert (given.json, given.no_trial, given.run) == (False, False, command._run)
    given, others = parser.parse_known_args(["doctor", "--json", "--no-trial", "--js"])
    assert (given.json, given.no_trial, others) == (True, True, ["--js"])
    asked: list[bool] = []
    monkeypatch.setattr(command, "_findings", lambda tries: asked.append(tries) or [])
    command._run(given, [])
    assert asked == [False]
