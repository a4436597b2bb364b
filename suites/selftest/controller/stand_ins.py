"""Stand-ins for the configuration, the launcher, the worlds and the items of a controller."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.controller.requests import REQUEST, Request
from lockstep.launch.processes import RankProgram
from lockstep.options import DEFAULTS
from lockstep.specification import WorldKey

KEY = WorldKey(2, "gloo", "cpu")
REQUESTED = Request(KEY, False, 60.0)
INI = {"ranks_start_method": "forkserver", "ranks_leaks": "warn"}


class Hooks:
    """The hooks of a configuration that features answer, by name; others answer None."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def hook(**given: Any) -> Any:
            self.asked[name] = given
            answer = self.answers.get(name)
            return answer(**given) if callable(answer) else answer

        return hook


def config_of(folder: Path, ini: dict[str, str] = INI, hooks: Hooks | None = None, **given: Any) -> Any:
    """Return the configuration of a run in a folder."""
    options = {
        **DEFAULTS,
        "subtest": [],
        "rank_output_dir": None,
        "capture": "fd",
        "runxfail": False,
        **given,
    }
    option = SimpleNamespace(override_ini=None, inifilename=None, plugins=[], **options)
    return SimpleNamespace(
        getoption=lambda name, default=None: vars(option).get(name, default),
        getini=ini.get,
        invocation_params=SimpleNamespace(dir=folder, args=()),
        hook=hooks or Hooks(pytest_ranks_repeated_options=[]),
        option=option,
        stash=pytest.Stash(),
        _parser=SimpleNamespace(_groups=[]),
    )


def item_of(config: Any, path: str = "test_x.py", **more: Any) -> Any:
    file = config.invocation_params.dir / path
    return SimpleNamespace(
        config=config, nodeid=f"{path}::test_y", path=file, stash=pytest.Stash(), keywords={}, **more
    )


class Server:
    """A launcher that notes what it is asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.signals: list[str] = []
        self.program: RankProgram | None = None
        self.forks = True

    def expect(self, module: str) -> None:
        self.said.append(f"expect {module}")

    def prestart(self) -> None:
        self.said.append("prestart")

    def stop(self) -> None:
        self.said.append("stop")

    def check_code(self, path: Path, root: Path, key: WorldKey) -> None:
        self.said.append(f"check {path.name} {root.name} {key.spread}")


class Worlds:
    """A pool of one world, whose item ends as it is said to."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = [*outcomes]
        self.said: list[str] = []
        self.runs: list[Any] = []
        self.name = "world-0"

    def take(self, key: WorldKey, *, fresh: bool) -> Any:
        self.said.append(f"take {key.size} {fresh}")
        return self

    def give_back(self, world: Any, *, keep: bool) -> None:
        self.said.append(f"give back {keep}")

    def discard(self, world: Any) -> None:
        self.said.append("discard")

    def run(self, run: Any) -> Any:
        self.runs.append(run)
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        self.said.append("close")

    def kill(self) -> None:
        self.said.append("kill")

    def interrupt(self, seconds: float) -> str:
        self.said.append(f"interrupt {seconds}")
        return "interrupted"


def ended(*, is_clean: bool = True, finished: int = 2) -> Any:
    """Return the outcome of an item on two ranks."""
    ranks = (SimpleNamespace(warnings=()),) * 2
    return SimpleNamespace(
        is_clean=lambda: is_clean, finished=lambda: [None] * finished, ranks=ranks, last_run=None
    )


class Item(SimpleNamespace):
    """An item, of which there is one."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def item_named(controller: Any, name: str, request: Any = REQUESTED, path: str = "test_x.py") -> Any:
    made = item_of(controller._config, path, location=(path, 1, name), originalname=name)
    item: Any = Item(**vars(made))
    item.nodeid = item.id = f"{path}::{name}"
    item.ihook = Hooks()
    if request is not None:
        item.stash[REQUEST] = request
    return item


def in_session(controller: Any, *items: Any) -> None:
    session = SimpleNamespace(
        items=[*items], _setupstate=SimpleNamespace(teardown_exact=lambda nextitem: None)
    )
    for item in items:
        item.session = session
