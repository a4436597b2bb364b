"""Starts of worlds: the session that ranks repeat, and what becomes of a world that does not start."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.backends.device import Device
from lockstep.controller import pytest_internals, world_starter
from lockstep.controller.world_starter import WorldStarter, xdist_input
from lockstep.exceptions import LaunchError, WorldError
from lockstep.output import OUTSIDE
from lockstep.specification import WorldKey
from suites.selftest.controller.stand_ins import INI, Hooks, config_of

KEY = WorldKey(2, "gloo", "cpu")


class Made:
    """A world that notes how it is started."""

    error: BaseException | None = None

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.started: dict[str, Any] = {}
        self.is_killed = False
        MADE.append(self)

    def start(self, **given: Any) -> None:
        self.started = given
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self.is_killed = True


MADE: list[Made] = []


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(world_starter, "World", Made)
    monkeypatch.setattr(Made, "error", None)
    MADE.clear()
    made = config_of(tmp_path, INI, Hooks(pytest_ranks_admit=None), world_seed=3, world_timeout=9.0)
    made.rootpath, made.inipath = tmp_path, tmp_path / "pytest.ini"
    made.invocation_params.args = ("-x", Path("a"), "--debug", "--debug=x", "--de")
    rewrite_hook = SimpleNamespace(_must_rewrite={"b", "a"})
    made.pluginmanager = SimpleNamespace(rewrite_hook=rewrite_hook, hasplugin="lockstep.plugin".__eq__)
    made._tmp_path_factory = SimpleNamespace(getbasetemp=lambda: tmp_path / "base")
    return made


def test_ranks_repeat_the_session_of_their_controller(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(config: Any, args: list[str], parts: dict[str, Any]) -> None:
        args.append("--of-feature")
        parts["feature"] = 1

    config.hook.answers["pytest_ranks_session"] = add
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "test_x")
    monkeypatch.setenv("OF_TEST", "1")
    starter: Any = WorldStarter(config, lambda: None)  # type: ignore[arg-type, return-value]
    spec = starter._session_spec()
    assert spec.args == ("-x", "a", "--de", "--of-feature")
    assert (spec.cwd, spec.rootdir, spec.inifile) == (str(tmp_path), str(tmp_path), f"{tmp_path}/pytest.ini")
    assert (spec.argv, spec.sys_path) == (tuple(sys.argv), tuple(sys.path))
    assert spec.environ == {
        name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"
    }
    assert spec.environ["OF_TEST"] == "1"
    assert (spec.captures, spec.output_directory) == (True, "")
    assert (spec.to_rewrite, spec.parts) == (("a", "b"), {"feature": 1})
    assert not spec.renames_plugin
    assert spec.workerinput["workerid"] == "master"
    assert starter._session_spec().workerinput is spec.workerinput
    config.inipath, config.option.capture = None, "sys"
    assert (starter._session_spec().inifile, starter._session_spec().captures) == ("", True)
    for capture in ("no", "tee-sys"):
        config.option.capture = capture
        assert not starter._session_spec().captures


def test_ranks_hear_that_the_plugin_has_another_name(config: Any) -> None:
    config.pluginmanager.hasplugin = "harness.plugin".__eq__
    starter: Any = WorldStarter(config, lambda: None)  # type: ignore[arg-type, return-value]
    assert starter._session_spec().renames_plugin


def test_ranks_are_workers_of_a_run(config: Any) -> None:
    def fill(config: Any, worker: dict[str, Any]) -> None:
        worker["of_plugin"] = 1

    config.hook.answers["pytest_ranks_worker"] = fill
    one, other = xdist_input(config), xdist_input(config)
    assert len(one["testrunuid"]) == 32
    assert one["testrunuid"] != other["testrunuid"]
    del one["testrunuid"]
    assert one == {"workerid": "master", "workercount": 1, "mainargv": sys.argv, "of_plugin": 1}
    config.workerinput = {"workerid": "gw1"}
    assert xdist_input(config) is config.workerinput


@pytest.mark.parametrize("worker", ["master", "gw1"])
def test_logs_that_a_controller_of_that_name_has_kept_are_removed(
    config: Any, tmp_path: Path, worker: str
) -> None:
    if worker != "master":
        config.workerinput = {"workerid": worker}
    config.option.rank_output_dir = "out"
    for name in ("master", "gw1"):
        (tmp_path / "out" / OUTSIDE / name).mkdir(parents=True)
    starter: Any = WorldStarter(config, lambda: None)  # type: ignore[arg-type, return-value]
    (left,) = (tmp_path / "out" / OUTSIDE).iterdir()
    assert left.name == {"master": "gw1", "gw1": "master"}[worker]
    assert starter._session_spec().output_directory == str(tmp_path / "out")


def test_a_world_gets_the_options_and_its_share(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "names", lambda device: ("0", "1"))
    launcher: Any = object()
    starter = WorldStarter(config, lambda: launcher)

    def make_room() -> None: ...

    world: Any = starter.start(KEY, make_room)
    assert world is MADE[0]
    key, name, session, of, share = MADE[0].given
    assert (key, name, of, share) == (KEY, "world-0", launcher, None)
    assert session.cwd == str(tmp_path)
    assert MADE[0].started == {"seed": 3, "gpus": (), "basetemp": tmp_path / "base", "timeout": 9.0}
    assert config.hook.asked["pytest_ranks_admit"] == {"config": config, "key": KEY, "make_room": make_room}
    cuda = WorldKey(2, "nccl", "cuda")
    starter.start(cuda, make_room)
    assert (MADE[1].given[1], MADE[1].started["gpus"]) == ("world-1", ("0", "1"))
    starter.start(WorldKey(2, "nccl", "cuda", spread=((0, 2),)), make_room)
    assert MADE[2].started["gpus"] == ()
    config.hook.answers["pytest_ranks_admit"] = share = SimpleNamespace(gpus=("1",))
    starter.start(cuda, make_room)
    assert (MADE[3].given[4], MADE[3].started["gpus"]) == (share, ("1",))


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (OSError(errno.ENOMEM, "no memory"), LaunchError, "no memory"),
        (WorldError("lost"), WorldError, "^lost$"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
    ],
)
def test_a_world_that_does_not_start_is_ended(
    config: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type[BaseException], why: str
) -> None:
    monkeypatch.setattr(Made, "error", error)
    with pytest.raises(kind, match=why) as raised:
        WorldStarter(config, lambda: object()).start(KEY, lambda: None)  # type: ignore[arg-type, return-value]
    assert raised.type is kind
    assert MADE[0].is_killed


def test_a_machine_that_cannot_start_ranks_has_no_world(config: Any) -> None:
    def launch() -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LaunchError, match="No space left on device"):
        WorldStarter(config, launch).start(KEY, lambda: None)
    assert MADE == []
    assert "pytest_ranks_admit" not in config.hook.asked


# The private names of pytest


def options_of(*names: str) -> Any:
    group = argparse.ArgumentParser().add_argument_group("g")
    for name in names:
        group.add_argument(name)
    options = [SimpleNamespace(names=lambda name=name: [name]) for name in names]
    return SimpleNamespace(name=f"group of {names[0]}", options=options, _arggroup=group)


def test_names_of_options_are_those_of_all_groups() -> None:
    parser: Any = SimpleNamespace(_groups=[options_of("--a", "--b")], _anonymous=options_of("-c"))
    assert pytest_internals.option_names(parser) == {"--a", "--b", "-c"}
    assert pytest_internals.option_names(SimpleNamespace()) == set()  # type: ignore[arg-type]
    groups = pytest_internals.option_groups(SimpleNamespace(_parser=parser))  # type: ignore[arg-type]
    assert {action.option_strings[0]: name for action, name in groups.items()} == {
        "--a": "group of --a",
        "--b": "group of --a",
    }
    assert pytest_internals.option_groups(SimpleNamespace(_parser=SimpleNamespace())) == {}  # type: ignore[arg-type]


def fixture(name: str = "world", module: str = "lockstep.fixtures", **attributes: Any) -> Any:
    return SimpleNamespace(__name__=name, __module__=module, **attributes)


def metafunc_of(marks: tuple[str, ...] = (), **fixtures: Any) -> Any:
    given = {name: [SimpleNamespace(func=each) for each in found] for name, found in fixtures.items()}
    return SimpleNamespace(
        _arg2fixturedefs=given,
        fixturenames=[*fixtures],
        _calls=[SimpleNamespace(marks=[SimpleNamespace(name=name)]) for name in marks],
    )


def test_a_test_that_uses_the_fixture_of_a_world_is_recognised() -> None:
    name_of_world = pytest_internals.name_of_world
    assert name_of_world(metafunc_of(plain=[fixture("plain")], world=[fixture()])) == "world"
    assert name_of_world(metafunc_of(mine=[fixture()])) == "mine"
    assert name_of_world(metafunc_of(world=[fixture(module="project")])) is None
    assert name_of_world(metafunc_of(world=[fixture(), fixture(module="project")])) is None
    only = {pytest_internals.ONLY_ON_RANKS: True}
    assert name_of_world(metafunc_of(mesh=[fixture("mesh", "x", **only)])) == "mesh"
    assert (
        name_of_world(metafunc_of(mesh=[fixture("mesh", "x", **{pytest_internals.ONLY_ON_RANKS: 1})])) is None
    )
    assert name_of_world(metafunc_of(("skip", "ranks"), world=[fixture()])) is None
    assert name_of_world(metafunc_of(("skip",), world=[fixture()])) == "world"
    assert name_of_world(SimpleNamespace(fixturenames=["world"])) is None  # type: ignore[arg-type]


def test_the_last_fixture_of_a_name_is_that_of_an_item() -> None:
    item: Any = SimpleNamespace(
        _fixtureinfo=SimpleNamespace(name2fixturedefs=metafunc_of(a=[1, 2])._arg2fixturedefs)
    )
    assert pytest_internals.fixture_of(item, "a") == 2
    assert pytest_internals.fixture_of(item, "b") is None
    assert pytest_internals.fixture_of(SimpleNamespace(), "a") is None  # type: ignore[arg-type]


def test_fixtures_are_torn_down_up_to_the_next_item() -> None:
    asked: list[object] = []
    state = SimpleNamespace(teardown_exact=asked.append)
    item: Any = SimpleNamespace(session=SimpleNamespace(_setupstate=state))
    call = pytest_internals.tear_down(item, "next")  # type: ignore[arg-type]
    assert (asked, call.when, call.excinfo) == (["next"], "teardown", None)
    state.teardown_exact = lambda nextitem: [].pop()
    assert pytest_internals.tear_down(item, None).excinfo is not None


def test_the_terminal_and_modules_of_a_configuration_are_found(config: Any) -> None:
    config.get_terminal_writer = lambda: SimpleNamespace(_file=sys.stderr)
    assert pytest_internals.terminal_stream(config) is sys.stderr
    assert pytest_internals.modules_to_rewrite(config) == ("a", "b")
    config.pluginmanager.rewrite_hook = None
    assert pytest_internals.modules_to_rewrite(config) == ()
