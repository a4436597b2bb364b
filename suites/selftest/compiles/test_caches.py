"""Compile caches of ranks: whose they are, where they are, and that they are kept."""

from __future__ import annotations

import io
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.compiles.cache_directory import cache_directory, clear, prepare
from lockstep.features.compiles.caches import RankCaches, machine, remembered
from lockstep.features.compiles.torch_internals import TRACE
from lockstep.specification import RankSpec, SessionSpec, WorldKey
from suites.selftest.project import WITHOUT_PLUGINS, Run, copy_project, run_pytest

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")


def run_cached(path: Path, *args: str, **environ: str) -> Run:
    return run_pytest(path, "--world-timeout=240", *args, **WITHOUT_PLUGINS, **environ)


def read(path: Path, name: str) -> str:
    (found,) = path.glob(name)
    return found.read_text()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project("compiles", tmp_path_factory.mktemp("cached"))


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return monkeypatch


def caches(directory: object, rank: int = 0, size: int = 2) -> RankCaches:
    session = SessionSpec((), "/", (), (), {}, {}, captures=True)
    spec = RankSpec(rank, WorldKey(size, "gloo", "cpu"), session, 0, f"{directory}/private", "")
    made = RankCaches(str(directory), spec, lambda: None)
    made.install()
    return made


def compile_something(made: RankCaches) -> Path:
    """Give the caches the first record of a trace; return the directory of inductor then."""
    made.emit(TRACE.makeRecord("torch", 10, "file", 1, "", (), None))
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def test_each_rank_and_size_has_directories_of_its_own(tmp_path: Path, environ: object) -> None:
    found = {compile_something(caches(tmp_path, rank, size)) for rank, size in ((0, 2), (1, 2), (0, 4))}
    (machine,) = (each for each in tmp_path.iterdir() if each.name.startswith("torch-"))
    places = {path.relative_to(machine).as_posix() for path in found}
    assert places == {"world-2/rank-0/inductor", "world-2/rank-1/inductor", "world-4/rank-0/inductor"}


def test_a_directory_in_use_is_left_to_its_user(tmp_path: Path, environ: object) -> None:
    first, second = caches(tmp_path), caches(tmp_path)
    before, after = compile_something(first), compile_something(caches(tmp_path))
    assert (before.parent.name, after.parent.name) == ("rank-0", "rank-0.1")
    second.close()


def test_nothing_is_made_until_something_is_compiled(tmp_path: Path, environ: object) -> None:
    made = caches(tmp_path)
    TRACE.removeHandler(made)
    assert [*tmp_path.iterdir()] == []
    assert os.environ["TRITON_CACHE_DIR"] == f"{made.path}/triton"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == f"{made.path}/extensions"


def test_a_cache_that_the_user_names_stays(tmp_path: Path, environ: pytest.MonkeyPatch) -> None:
    environ.setenv("TORCH_EXTENSIONS_DIR", "/somewhere")
    TRACE.removeHandler(caches(tmp_path))
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "/somewhere"


def test_without_a_directory_nothing_is_kept(tmp_path: Path, environ: object) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()  # as no directory can be made below it
    made = caches(blocked)
    TRACE.removeHandler(made)
    assert made.path == Path(f"{blocked}/private/rank-0.caches")


def test_the_cpu_is_probed_once(tmp_path: Path) -> None:
    calls: list[str] = []

    def probe() -> bool:
        calls.append("probed")
        return True

    assert [remembered(tmp_path / "cpu", "avx2", probe) for _ in range(3)] == [True] * 3
    assert remembered(tmp_path / "cpu", "avx512", probe)
    assert len(calls) == 2


def test_a_probe_that_fails_is_tried_again(tmp_path: Path) -> None:
    answers = iter([False, True])
    assert [remembered(tmp_path, "avx2", lambda: next(answers)) for _ in range(3)] == [False, True, True]


def test_clearing_leaves_what_another_run_uses(tmp_path: Path, environ: object) -> None:
    used = compile_something(caches(tmp_path, rank=0)).parent
    free = used.with_name("rank-1")
    free.mkdir()
    Path(f"{free}.lockstep-lease").touch()
    with pytest.warns(UserWarning, match="another run uses .*rank-0, which stays"):
        clear(tmp_path)
    assert (used.exists(), free.exists()) == (True, False)


def test_workers_of_xdist_never_share_a_directory(project: Path) -> None:
    run = run_cached(project, "-n2", "--compile-cache=kept", "test_cached.py", "-k", "leased", "-pxdist")
    assert run.count().startswith("2 passed"), run.output
    for rank in (0, 1):
        of_both = {read(project, f"leased{number}-*-{rank}.txt") for number in (0, 1)}
        assert {Path(path).parent.name for path in of_both} == {f"rank-{rank}", f"rank-{rank}.1"}
        assert all(path.startswith(f"{project}/kept/torch-") for path in of_both)


def test_the_default_is_a_folder_in_the_cache_of_pytest(project: Path) -> None:
    run = run_cached(project, "test_cached.py", "-k", "nothing or of_the_test")
    assert run.count().startswith("4 passed"), run.output  # each rank of a fake world is a test
    place = f"{project}/.pytest_cache/d/lockstep-compiled/torch-"
    assert read(project, "unused-*-1.txt").startswith(place)
    assert not (project / ".pytest_cache" / "d").exists()


@pytest.mark.parametrize(
    ("option", "ini", "variable", "place"),
    [
        ("of_option", "of_ini", "/of/variable", "/run/of_option"),
        (None, "of_ini", "/of/variable", "/root/of_ini"),
        (None, "", "/of/variable", "/of/variable"),
        (None, "", f"{tempfile.gettempdir()}/torchinductor_me", "/root/kept/d/lockstep-compiled"),
        (None, "", None, "/root/kept/d/lockstep-compiled"),
    ],
)
def test_the_option_goes_before_the_ini_file_and_that_before_the_variable(
    environ: pytest.MonkeyPatch, option: str | None, ini: str, variable: str | None, place: str
) -> None:
    if variable:
        environ.setenv("TORCHINDUCTOR_CACHE_DIR", variable)
    config: Any = SimpleNamespace(
        invocation_params=SimpleNamespace(dir=Path("/run")),
        rootpath=Path("/root"),
        inipath=Path("/root/pytest.ini"),
        pluginmanager=SimpleNamespace(hasplugin=lambda name: True),
        getoption={"ranks_compile_cache": option}.get,
        getini={"ranks_compile_cache": ini, "cache_dir": "kept"}.get,
    )
    assert cache_directory(config) == place


def test_the_cache_of_pytest_is_left_out_where_it_is_off(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("KEPT", "expanded")
    environ.setenv("TORCHINDUCTOR_CACHE_DIR", "relative/torchinductor_me")
    config: Any = SimpleNamespace(
        rootpath=Path("/root"),
        inipath=None,
        pluginmanager=SimpleNamespace(hasplugin=lambda name: name != "cacheprovider"),
        getoption=lambda name: None,
        getini={"ranks_compile_cache": "", "cache_dir": "$KEPT"}.get,
    )
    assert cache_directory(config) == os.path.abspath("relative/torchinductor_me")
    environ.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache_directory(config) == ""
    config.pluginmanager.hasplugin = lambda name: name == "cacheprovider"
    assert cache_directory(config) == "/root/expanded/d/lockstep-compiled"
    config.getini = {"ranks_compile_cache": "of_ini"}.get
    assert cache_directory(config) == "/root/of_ini"


def options_of(path: Path, given: str | None = None, ini: str = "", clears: bool = False) -> Any:
    options = {"ranks_compile_cache": given, "ranks_compile_cache_clear": clears}
    return SimpleNamespace(
        invocation_params=SimpleNamespace(dir=path),
        rootpath=path,
        inipath=None,
        pluginmanager=SimpleNamespace(hasplugin=lambda name: False),
        getoption=options.get,
        getini={"ranks_compile_cache": ini}.get,
    )


def test_a_folder_that_was_chosen_is_made_and_emptied_before_any_worker(
    tmp_path: Path, environ: object
) -> None:
    prepare(options_of(tmp_path, clears=True))
    assert [*tmp_path.iterdir()] == []
    for given in ({"given": "of_option"}, {"ini": "of/ini"}):
        prepare(options_of(tmp_path, **given))
    assert (tmp_path / "of_option").is_dir()
    probes = tmp_path / "of" / "ini" / "torch-x" / "cpu"
    probes.mkdir(parents=True)
    prepare(options_of(tmp_path, ini="of/ini"))
    assert probes.exists()
    worker = options_of(tmp_path, "of_worker", clears=True)
    worker.workerinput = {}
    prepare(worker)
    assert not (tmp_path / "of_worker").exists()
    prepare(options_of(tmp_path, ini="of/ini", clears=True))
    assert not probes.exists()
    assert probes.parent.exists()


@pytest.mark.parametrize(("given", "name"), [("x", "--compile-cache"), (None, "ranks_compile_cache")])
def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, name: str
) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(pytest.UsageError) as refused:
        prepare(options_of(tmp_path, given, "x"))
    assert str(refused.value) == f"{name}: {tmp_path}/x cannot be written to; choose another folder"
    assert asked == [(f"{tmp_path}/x", os.W_OK | os.X_OK)]


def test_a_directory_that_cannot_be_leased_is_replaced_by_the_ranks_own(
    tmp_path: Path, environ: object
) -> None:
    made = caches(tmp_path / "kept")
    made.path.parent.mkdir(parents=True)
    made.path.touch()
    with pytest.warns(UserWarning, match="^--compile-cache: cannot use .*rank-0: File exists; what"):
        place = compile_something(made)
    assert place == tmp_path / "kept" / "private" / "rank-0.caches" / "inductor"
    assert made not in TRACE.handlers


def test_a_directory_is_leased_once_and_only_if_the_test_has_not_named_another(
    tmp_path: Path, environ: pytest.MonkeyPatch
) -> None:
    first: list[str] = []
    made = caches(tmp_path)
    made._compiles = lambda: first.append("compiles")
    environ.setenv("TORCHINDUCTOR_CACHE_DIR", "/of/the/test")
    assert compile_something(made) == Path("/of/the/test")
    assert (made._locked, first) == (-1, ["compiles"])
    environ.setenv("TORCHINDUCTOR_CACHE_DIR", str(made.path / "inductor"))
    place = compile_something(made)
    lock = made._locked
    assert lock > 2
    assert compile_something(made) == place == made.path / "inductor"
    assert made._locked == lock
    assert Path(f"{made.path}.lockstep-lease").exists()
    assert made.path.is_dir()


def test_probes_are_remembered_where_caches_are_kept(
    tmp_path: Path, environ: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("lockstep.features.compiles.caches.remember_probes", given.append)
    blocked = tmp_path / "blocked"
    blocked.touch()
    with pytest.warns(UserWarning, match="Not a directory"):
        compile_something(caches(blocked))
    assert given == []
    compile_something(caches(tmp_path / "kept"))
    (remember,) = given
    assert remember("avx2", lambda: True)
    (probe,) = (tmp_path / "kept").glob("torch-*/cpu/*")
    assert (len(probe.name), probe.read_text()) == (16, "succeeded\n")


def test_a_probe_runs_where_nothing_can_be_kept(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()
    assert [
        remembered(blocked / "cpu", "avx2", lambda answer=answer: answer) for answer in (True, False)
    ] == [True, False]


def test_a_machine_is_named_by_torch_python_and_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    head = f"torch-{torch.__version__}-python-{sys.version_info[0]}.{sys.version_info[1]}-"
    assert machine().startswith(head)
    texts = [
        b"",
        b"model name: a\nflags: b\nbugs: c\nflags: d\n",
        b"model name: a\nflags: b\nbugs: e\nflags: f",
    ]
    texts += [b"Features: b\n", b"model name: b\nflags: b", b"\xff"]
    names: list[str] = []
    for text in texts:
        monkeypatch.setattr("builtins.open", lambda *_, text=text: io.BytesIO(text))
        names.append(machine())
    assert names[1] == names[2]
    assert names[0] == names[5]
    assert len({*names}) == 4
    assert all(len(name) == len(head) + 8 for name in names)

    def refuses(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("builtins.open", refuses)
    assert machine() == names[0]
    monkeypatch.setattr(platform, "machine", lambda: "other")
    assert machine() != names[0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--compile-cache="], "--compile-cache '': write the path of a folder"),
        (["--compile-cache=pytest.ini"], "--compile-cache: cannot make the folder: "),
        (["-oranks_compile_cache=pytest.ini/x"], "ranks_compile_cache: cannot make the folder: "),
    ],
)
def test_a_directory_that_cannot_be_is_one_sentence(project: Path, options: list[str], sentence: str) -> None:
    run = run_cached(project, *options)
    assert run.status == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {sentence}" in run.output


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: apt-get install g++")
def test_a_second_run_finds_the_code_of_the_first(project: Path) -> None:
    select = ("test_cached.py", "-k", "inductor")
    first = run_cached(project, *select)
    assert first.count().startswith("2 passed"), first.output  # also the test after it in the process
    assert "warning" not in first.output  # of what inductor leaves in a process
    cold = [read(project, f"inductor-*-{rank}.txt").split() for rank in (0, 1)]
    assert run_cached(project, *select).count().startswith("2 passed")
    warm = [read(project, f"inductor-*-{rank}.txt").split() for rank in (0, 1)]
    assert [hits for hits, _, _ in cold] == ["0", "0"]
    assert [misses for _, misses, _ in warm] == ["0", "0"]
    assert [path for _, _, path in warm] == [path for _, _, path in cold]
    probes = [*(project / ".pytest_cache").rglob("cpu/*")]
    probed = "avx2" in Path("/proc/cpuinfo").read_text().split()
    assert [each.read_text() for each in probes] == ["succeeded\n"] * probed
    cleared = run_cached(project, "--compile-cache-clear", "test_cached.py", "-k", "nothing_compiled")
    assert cleared.count().startswith("1 passed"), cleared.output
    assert not [*(project / ".pytest_cache").rglob("fxgraph")]
