"""Each finding of the doctor, provoked: by a real cause where one can be set, else by a fake."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.doctor import configuration, installation, machine, plugins
from lockstep.doctor.finding import MIB, Finding
from lockstep.features.adopt.plugin import FAMILIES
from lockstep.features.leases.lease_store import LeaseStore, ResourceRequest

Patch = pytest.MonkeyPatch
TORCH = {"version": "2.13.0", "cuda": None, "hip": None, "distributed": True, "gpus": []}
GPU = {"name": "H200", "free": 100 * MIB, "total": 10000 * MIB}


def the(found: Finding | Iterable[Finding], name: str, level: str) -> Finding:
    """Return the one finding of a name and level; whatever is no `ok` says why, and a problem what to do."""
    each = [found] if isinstance(found, Finding) else list(found)
    (finding,) = (one for one in each if (one.name, one.level) == (name, level))
    assert level == "ok" or finding.why
    assert level != "problem" or finding.remedy
    return finding


@pytest.fixture
def temporary(monkeypatch: Patch) -> Callable[[Path], None]:
    """Return a function that sets TMPDIR, for what asks next."""

    def choose(path: Path) -> None:
        monkeypatch.setenv("TMPDIR", str(path))
        monkeypatch.setattr(tempfile, "tempdir", None)

    return choose


def mount(monkeypatch: Patch, **different: int) -> None:
    here = os.statvfs(tempfile.gettempdir())
    facts = {name: getattr(here, name) for name in dir(here) if name.startswith("f_")}
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(**{**facts, **different}))


def refuse(number: int) -> Callable[..., Any]:
    def refusing(*args: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refusing


def test_a_deep_temporary_directory(tmp_path: Path, temporary: Any) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    temporary(deep)
    finding = the(machine.temporary_directory(), "temp-length", "note")
    assert finding.what.endswith(f"has {len(str(deep))} characters")


def test_a_deep_temporary_directory_without_tmp(tmp_path: Path, temporary: Any, monkeypatch: Patch) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    temporary(deep)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in the(machine.temporary_directory(), "temp-length", "problem").why


def test_a_temporary_directory_that_is_missing(tmp_path: Path, temporary: Any) -> None:
    temporary(tmp_path / "gone")
    finding = the(machine.temporary_directory(), "temp", "note")
    assert f"TMPDIR={tmp_path}/gone is not used" in finding.what


def test_no_temporary_directory_at_all(temporary: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", refuse(errno.ENOENT))
    the(machine.temporary_directory(), "temp", "problem")


@pytest.mark.parametrize(("free", "level"), [(1, "problem"), (500, "note"), (5000, "ok")])
def test_little_space(free: int, level: str, monkeypatch: Patch) -> None:
    mount(monkeypatch, f_bavail=free, f_frsize=MIB)
    assert f"has {free} MiB free" in the(machine.temporary_directory(), "temp-space", level).what


def test_no_inode_is_left(monkeypatch: Patch) -> None:
    mount(monkeypatch, f_files=1000, f_favail=0)
    assert "no inode left" in the(machine.temporary_directory(), "temp-space", "problem").what


def test_a_temporary_directory_mounted_noexec(monkeypatch: Patch) -> None:
    mount(monkeypatch, f_flag=os.ST_NOEXEC)
    assert "torch.compile" in the(machine.temporary_directory(), "temp-noexec", "note").why


def test_no_compiler(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = machine.compiler()
    assert (found.level, found.what) == ("note", "no C++ compiler no-such-compiler on the path")
    assert "apt-get install g++" in found.remedy


@pytest.mark.parametrize(("limit", "level"), [(8, "problem"), (200, "note"), (65536, "ok")])
def test_few_descriptors(limit: int, level: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(os, "listdir", lambda _: ["0", "1", "2"])
    finding = the(machine.open_files(), "open-files", level)
    assert level == "ok" or "`ulimit -n 1024`" in finding.remedy


def test_descriptors_without_a_limit(monkeypatch: Patch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert the(machine.open_files(), "open-files", "ok").what == "no limit"


@pytest.mark.parametrize(("left", "level"), [(5, "problem"), (100, "note"), (5000, "ok")])
def test_few_processes_of_a_user(left: int, level: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "_threads_of_user", lambda: 100)
    monkeypatch.setattr(machine, "_number", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100 + left, 100 + left))
    assert f"{left} more processes" in the(machine.processes(), "processes", level).what


def test_threads_of_a_user_are_counted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(machine, "_number", lambda _: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    ended = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(ended.wait)
        try:
            left, _, _ = the(machine.processes(), "processes", "ok").what.partition(" ")
        finally:
            ended.set()
    assert int(left) <= (1 << 20) - 4


def test_few_processes_of_a_container(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "_number", lambda path: 64 if path.endswith("max") else 60)
    assert "--pids-limit" in the(machine.processes(), "processes", "problem").remedy


def test_one_core(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert "--world-timeout" in the(machine.processors(), "cores", "note").remedy


def test_a_part_of_the_cores(monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(Path, "read_text", lambda _: "350000 100000\n")
    assert the(machine.processors(), "cores", "ok").what == "3 cores"


@pytest.mark.parametrize(("left", "level"), [(300, "problem"), (1000, "note")])
def test_little_memory_in_a_container(left: int, level: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "_number", lambda path: (1000 + left if "max" in path else 1000) * MIB)
    assert the(machine.memory(), "memory", level).what == f"{left} MiB can be had"


def test_small_shared_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * MIB))
    assert "--shm-size" in the(machine.shared_memory(), "dev-shm", "note").remedy


def test_no_shared_memory(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", refuse(errno.ENOENT))
    assert "No such file" in the(machine.shared_memory(), "dev-shm", "note").what


@pytest.mark.parametrize(("name", "call"), [("memfd", "memfd_create"), ("pidfd", "pidfd_open")])
def test_system_calls_that_a_sandbox_refuses(name: str, call: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(os, call, refuse(errno.EPERM))
    finding = the(machine.kernel(), name, "problem")
    assert finding.what.endswith("Operation not permitted")
    assert "gloo" in finding.remedy


def test_memory_that_another_process_may_not_open(monkeypatch: Patch) -> None:
    refused = SimpleNamespace(returncode=errno.EACCES)
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: refused)
    assert the(machine.kernel(), "memfd", "problem").what.endswith("Permission denied")


def test_a_process_that_does_not_end_is_a_finding(monkeypatch: Patch) -> None:
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 20)

    monkeypatch.setattr(machine.subprocess, "run", run)
    assert the(machine.kernel(), "memfd", "problem").what.endswith("Connection timed out")


def test_no_loopback_interface(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine.socket, "create_server", refuse(errno.EADDRNOTAVAIL))
    assert "ip link set lo up" in the(machine.loopback(), "loopback", "problem").remedy


def test_another_system(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    assert "Linux alone" in the(machine.system(), "system", "note").why


def test_another_processor(monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert "x86-64 alone" in the(machine.system(), "system", "note").why


@pytest.mark.parametrize("name", ["WORLD_SIZE", "PYTEST_ADDOPTS", "TORCH_DISTRIBUTED_DEBUG"])
def test_variables_that_change_a_run(name: str, monkeypatch: Patch) -> None:
    monkeypatch.setenv(name, "x")
    assert the(machine.environment(), f"variable-{name}", "note").what == f"{name}=x"


def test_an_old_python(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10))
    the(installation.python(), "python", "problem")


def test_python_without_the_gil(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert the(installation.python(), "python", "note").what.endswith(", without the GIL")


@pytest.mark.parametrize("version", ["8.4.2", None])
def test_pytest_that_is_old_or_missing(version: str | None, monkeypatch: Patch) -> None:
    def find(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", find)
    assert "pip install 'pytest>=9'" in the(installation.needed("pytest", (9,)), "pytest", "problem").remedy


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        ({}, "problem", "is not installed"),
        ({"error": "OSError: libcudart.so.13"}, "problem", "libcudart"),
        ({**TORCH, "distributed": False}, "problem", "CPU"),
        ({**TORCH, "version": "2.10.1"}, "problem", "2.10.1"),
        ({**TORCH, "version": "2.99.0", "cuda": "14.1"}, "note", "2.99.0, built for CUDA 14.1"),
        ({**TORCH, "version": "2.13.0a0+git1"}, "ok", "2.13.0a0+git1, built for CPU"),
    ],
)
def test_torch_that_does_not_serve(answer: dict[str, Any], level: str, said: str) -> None:
    assert said in the(installation.torch(answer), "torch", level).what


def test_torch_that_ends_its_process(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(7)")
    monkeypatch.chdir(tmp_path)
    assert installation.read_torch(None) == {}
    answer = installation.read_torch(installation.start_asking_torch())
    assert answer == {"error": "`import torch` ended the process: exit code 7"}


def test_torch_that_is_not_imported_in_time(monkeypatch: Patch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installation, "TORCH_WITHIN", 0.1)
    process = installation.start_asking_torch()
    assert installation.read_torch(process) == {"error": "`import torch` takes more than 0.1 s"}
    assert process is not None
    assert process.returncode == -9


def test_files_that_are_not_installed(monkeypatch: Patch) -> None:
    def find(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", find)
    assert "-p lockstep" in the(installation.registration(), "lockstep", "problem").remedy


def test_gpus_in_use_and_hidden(monkeypatch: Patch) -> None:
    assert "100 of 10000 MiB free" in the(installation.gpus({"gpus": [GPU]}), "gpu-0", "note").what
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "hides them" in the(installation.gpus(TORCH), "gpu", "note").what


def test_plugins_that_change_something(monkeypatch: Patch) -> None:
    found = {"pytest-benchmark": "5.3.1", "pytest-timeout": "2.4.0", "pytest-mock": "3.17.0"}
    monkeypatch.setattr(plugins, "_installed", lambda: found)
    each = list(plugins.plugins())
    assert "--benchmark-disable" in the(each, "plugin-pytest-benchmark", "note").remedy
    assert "deadline" in the(each, "plugin-pytest-timeout", "ok").what
    assert the(each, "plugins", "ok").what.startswith("3 installed")


def test_plugins_of_pytest_that_are_installed_are_found_by_the_names_of_indexes(monkeypatch: Patch) -> None:
    def installed(name: str, group: str) -> Any:
        return SimpleNamespace(
            metadata={"Name": name}, version="1.0", entry_points=[SimpleNamespace(group=group)]
        )

    every = [
        *(installed("lockstep-harness", "pytest11"), installed("Pytest_Some.Thing", "pytest11")),
        installed("tox", "console_scripts"),
    ]
    monkeypatch.setattr(metadata, "distributions", lambda: every)
    (found,) = plugins.plugins()
    assert found.what == "1 installed that pytest loads by itself"
    assert plugins._installed() == {"pytest-some-thing": "1.0"}


def test_plugins_are_described_as_on_their_page() -> None:
    """Each row of a plugin that does not simply work has its finding, with sentences of that row."""
    page = (Path(__file__).parents[3] / "docs/reference/plugins.md").read_text().replace("`", "")
    tried, exceptions = page.split("## What was tried")
    verdicts = dict(re.findall(r"^\| (\S+) [\d.]+ \| ([^|]*) \|", tried, re.M))
    limited = {name for name, verdict in verdicts.items() if verdict != "works"}
    others = set(re.findall(r"^\| (pytest-\w+) \|", exceptions, re.M))
    said = {name: (sentence,) for name, sentence in plugins.NOTES.items()} | plugins.LIMITS
    assert limited <= set(plugins.LIMITS)
    assert others <= set(said) <= others | set(verdicts)
    for name, sentences in said.items():
        row = re.findall(rf"^\| {name} .*", page, re.M)[-1].lower()
        assert [sentence for sentence in sentences if sentence.lower() not in row] == []


FILES = {
    "pytest.toml": "[pytest]\nranks_at_once = 1\n",
    "pytest.ini": "[pytest]\nranks_at_once = 1\n",
    "pyproject.toml": "[tool.pytest.ini_options]\nranks_at_once = '1'\n",
    "tox.ini": "[pytest]\nranks_at_once = 1\n",
    "setup.cfg": "[tool:pytest]\nranks_at_once = 1\n",
}


@pytest.mark.parametrize("name", FILES)
def test_too_few_ranks_at_once_in_any_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/pyproject.toml").write_text("[project]\n")
    found = configuration.configured(configuration.configuration(tmp_path / "tests"))
    assert str(tmp_path / name) in the(found, "ranks-at-once", "problem").remedy


@pytest.mark.parametrize(
    "text",
    [
        "ranks_at_once = 2020-01-01",
        "ranks_at_once = '²'",
        f"ranks_at_once = '{'9' * 5000}'",
        f"x = {'[' * 5000}",
    ],
    ids=["a date", "no decimal", "long", "deep"],
)
def test_an_odd_value_in_a_configuration_is_no_error_of_doctor(text: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.toml").write_text(f"[pytest]\n{text}\n")
    project = configuration.configuration(tmp_path)
    assert [each.level for each in configuration.configured(project)] == ["ok"]


def test_spawned_ranks(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nranks_start_method = spawn\n")
    project = configuration.configuration(tmp_path)
    assert (
        f"spawn, set in {tmp_path}/pytest.ini"
        in the(configuration.start_method(project), "start-method", "note").what
    )


@pytest.mark.parametrize(
    ("ini", "level", "said"),
    [
        ("", "ok", "none: set ranks_adopt"),
        ("ranks_adopt = torch spawn", "ok", "torch: MultiProcessTestCase and"),
        ("addopts = -q --ranks-adopt spawn,deepspeed", "ok", "spawn: plain calls of spawn run on ranks"),
        ("ranks_adopt = spwan", "problem", "unknown kind 'spwan'"),
        ("ranks_adopt = spawn\nranks_start_method = spawn", "note", "spawn, with ranks_start_method = spawn"),
        ("ranks_adopt = spawn\naddopts = --hosts 2", "note", "spawn, with --hosts in addopts"),
    ],
)
def test_adopted_kinds(ini: str, level: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    project = configuration.configuration(tmp_path)
    assert said in the(configuration.adoption(project), "adoption", level).what


def test_adopted_kinds_are_those_of_the_plugin() -> None:
    assert tuple(configuration._ADOPTED) == FAMILIES


def test_leases_that_are_held(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCKSTEP_LEASES", str(tmp_path / "leases"))
    store = LeaseStore(tmp_path / "leases")
    with store.locked():
        _, keeper = store.add(ResourceRequest(7, "/project", 2))
    finding = the(machine.leases(), "lease", "note")
    os.close(keeper)
    assert finding.what == "held by pid 7 in /project (2 ranks)"


def test_leases_that_others_may_write(tmp_path: Path, monkeypatch: Patch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LOCKSTEP_LEASES", str(tmp_path))
    assert "LOCKSTEP_LEASES" in the(machine.leases(), "leases", "problem").remedy


def test_looking_at_leases_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("LOCKSTEP_LEASES", str(tmp_path / "leases"))
    assert "none held" in the(machine.leases(), "leases", "ok").what
    assert list(tmp_path.iterdir()) == []


def test_the_page_lists_every_finding() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/doctor.md").read_text()
    sources = "".join(path.read_text() for path in Path(machine.__file__).parent.glob("*.py"))
    names = set(re.findall(r'\b(?:ok|note|problem)\(\s*"([\w-]+)"', sources))
    assert len(names) > 20
    assert {name for name in names if f"`{name}`" not in page} == set()
