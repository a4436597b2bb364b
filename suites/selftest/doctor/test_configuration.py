"""The configuration that pytest reads, its options, and plugins: found where pytest does, and described."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.doctor import configuration, plugins
from lockstep.doctor.configuration import Configuration
from lockstep.doctor.finding import note, ok, problem

INI = "[pytest]\nranks_x = {}\n"
TOML = "[pytest]\nranks_x = '{}'\n"


def project(path: Path | None = Path("/p/pytest.ini"), addopts: str = "", **options: Any) -> Configuration:
    return Configuration(path, options, addopts)


def test_a_configuration_is_that_of_the_first_file_that_pytest_takes(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    files = {
        folder / "pytest.toml": TOML,
        folder / ".pytest.toml": TOML,
        folder / "pytest.ini": INI,
        folder / ".pytest.ini": INI,
        folder / "pyproject.toml": "[tool.pytest.ini_options]\nranks_x = '{}'\n",
        folder / "tox.ini": INI,
        folder / "setup.cfg": "[tool:pytest]\nranks_x = {}\n",
        tmp_path / "a" / "tox.ini": INI,
        tmp_path / "pytest.ini": INI,
    }
    for number, (path, text) in enumerate(files.items()):
        path.write_text(text.format(number))
    for number, path in enumerate(files):
        assert configuration.configuration(folder) == Configuration(path, {"ranks_x": str(number)})
        path.unlink()
    assert configuration.configuration(folder).path is None


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("pytest.ini", "no section", Configuration(Path("pytest.ini"), {})),
        ("pytest.ini", "[other]", Configuration(Path("pytest.ini"), {})),
        (
            "pytest.ini",
            "[pytest]\nx=1\nranks_y = %(z)s",
            Configuration(Path("pytest.ini"), {"ranks_y": "%(z)s"}),
        ),
        ("tox.ini", "[tool:pytest]\nranks_y=1", None),
        ("setup.cfg", "[pytest]\nranks_y=1", None),
        ("tox.ini", "[pytest]\naddopts = -q --x", Configuration(Path("tox.ini"), {}, "-q --x")),
        ("pyproject.toml", "[pytest]\nranks_y=1", None),
        ("pyproject.toml", "[tool]\npytest = 3", None),
        ("pyproject.toml", "tool = 3", None),
        ("pyproject.toml", "[tool.pytest]\nranks_y=1", Configuration(Path("pyproject.toml"), {"ranks_y": 1})),
        (
            "pyproject.toml",
            "[tool.pytest.ini_options]\nranks_y=[1]\naddopts=['-q']",
            Configuration(Path("pyproject.toml"), {"ranks_y": [1]}, "['-q']"),
        ),
        ("pytest.toml", "pytest = 1", Configuration(Path("pytest.toml"), {})),
        ("pytest.toml", "[tool.pytest]\nranks_y=1", Configuration(Path("pytest.toml"), {})),
    ],
)
def test_a_file_is_read_as_pytest_does(
    name: str, text: str, found: Configuration | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    read = configuration.configuration(tmp_path)
    expected = found or Configuration(None, {})
    path = None if expected.path is None else tmp_path / expected.path
    assert read == Configuration(path, expected.options, expected.addopts)


def test_the_start_of_ranks_is_described() -> None:
    fine = ok("start-method", "forkserver: ranks are forked from a server that has imported torch")
    assert configuration.start_method(project()) == fine
    assert configuration.start_method(project(ranks_start_method="forkserver")) == fine
    assert configuration.start_method(project(ranks_start_method="spawn")) == note(
        "start-method",
        "spawn, set in /p/pytest.ini",
        "each rank is a new interpreter that imports torch: two seconds instead of 0.1",
        "take it out unless a module of yours cannot be imported before a fork",
    )


TORCH = "torch: MultiProcessTestCase and MultiProcContinuousTest run on ranks"
DEEPSPEED = "deepspeed: DistributedTest runs on ranks"
SPAWN = "spawn: plain calls of spawn run on ranks, other processes that tests start come from their server"


@pytest.mark.parametrize(
    ("addopts", "option", "words"),
    [
        ("", "torch deepspeed", f"{TORCH}; {DEEPSPEED}"),
        ("", ["spawn"], SPAWN),
        ("--ranks-adopt=torch", "spawn", TORCH),
        ("--ranks-adopt  'torch,spawn' -q", "", f"{TORCH}; {SPAWN}"),
        ("--ranks-start-method", "spawn", SPAWN),
        ("--ranks-hostsx", "spawn", SPAWN),
    ],
)
def test_tests_that_are_adopted_are_described(addopts: str, option: Any, words: str) -> None:
    assert configuration.adoption(project(addopts=addopts, ranks_adopt=option)) == ok("adoption", words)


def test_adoption_that_cannot_be_is_described() -> None:
    assert configuration.adoption(project(ranks_adopt="torch x y")) == problem(
        "adoption",
        "unknown kind 'x' in ranks_adopt",
        "pytest refuses to start",
        "choose among torch, deepspeed, spawn",
    )
    assert configuration.adoption(project()) == ok(
        "adoption", "none: set ranks_adopt where tests start their own processes"
    )
    why = "no server is on this machine: processes of tests are new interpreters, as without adoption"
    for addopts, method, setting in (
        ("", "spawn", "ranks_start_method = spawn"),
        ("--hosts 2", "", "--hosts in addopts"),
        ("--ranks-hosts=2", "", "--hosts in addopts"),
    ):
        given = project(addopts=addopts, ranks_adopt="torch spawn", ranks_start_method=method)
        assert configuration.adoption(given) == note(
            "adoption", f"torch, spawn, with {setting}", why, f"take {setting} out for tests that spawn"
        )
    assert configuration.adoption(project(ranks_adopt="torch", ranks_start_method="spawn")).level == "ok"


def test_options_of_a_configuration_are_listed() -> None:
    found = [*configuration.configured(project(None, ranks_at_once="1"))]
    assert found == [ok("configuration", "no configuration file of pytest here or above")]
    found = [*configuration.configured(project())]
    assert found == [ok("configuration", "/p/pytest.ini: no option of Lockstep")]
    found = [*configuration.configured(project(ranks_at_once="2", ranks_adopt=["a"]))]
    assert found == [ok("configuration", '/p/pytest.ini: ranks_adopt = ["a"], ranks_at_once = "2"')]
    found = [*configuration.configured(project(ranks_at_once=1))]
    assert found == [
        ok("configuration", "/p/pytest.ini: ranks_at_once = 1"),
        problem(
            "ranks-at-once",
            "ranks_at_once = 1",
            "a test on two ranks is refused",
            "set it to 2 or more in /p/pytest.ini",
        ),
    ]


def test_plugins_are_listed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"syrupy": "5", "other": "1", "pytest-cov": "7"}
    monkeypatch.setattr(plugins, "_installed", lambda: found)
    why, remedy = plugins.LIMITS["syrupy"]
    assert [*plugins.plugins()] == [
        ok("plugin-pytest-cov", f"pytest-cov 7: {plugins.NOTES['pytest-cov']}"),
        note("plugin-syrupy", "syrupy 5", why, remedy),
        ok("plugins", "3 installed that pytest loads by itself"),
    ]


def test_a_plugin_without_a_name_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [SimpleNamespace(group="console_scripts"), SimpleNamespace(group="pytest11")]
    made = SimpleNamespace(metadata={"Name": None}, version="1", entry_points=entries)
    monkeypatch.setattr(plugins.metadata, "distributions", lambda: [made])
    assert plugins._installed() == {"": "1"}
