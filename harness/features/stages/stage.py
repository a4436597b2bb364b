"""The decorator `stage`, which makes fixtures, and the stages that a test requests.

Used on both sides at collection, and on ranks; must not import torch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from lockstep.bounds import MOST_PROCESSES, is_whole, shown
from lockstep.hookspecs import ONLY_ON_RANKS
from lockstep.rank_session import session_of

__all__ = ["stage"]

FEATURE = "stages"
KIND = "stage"

Scope = Literal["function", "class", "module", "package", "session"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A function that runs on a world of its own."""

    function: Callable[..., object]
    ranks: int
    scope: Scope


def stage(ranks: int, scope: Scope = "function") -> Callable[[Callable[..., object]], Any]:
    """Make a fixture of a function that runs on `ranks` ranks before a test that requests it.

        @lockstep.stage(ranks=4)
        def saved(world):
            torch.save(..., world.shared_tmp_path / f"{world.rank}.pt")


        @pytest.mark.ranks(2)
        def test_load(world, saved):
            torch.load(saved / "0.pt")

    The fixture's value, on each rank of the test, is the `shared_tmp_path` that the stage had. What the stage
    requests is set up for it in its own world, and for the test in the test's.

    Args:
        ranks: size of the stage's world; backend, device, deadline and `fresh` are those of the test.
        scope: as of `pytest.fixture`: for what the stage runs once. Parameters make it run again.

    Raises:
        TypeError: an argument, or the function, cannot be that of a stage.
        ValueError: there is no world of that size, or no such scope.
    """
    if not is_whole(ranks):
        raise TypeError(
            f"stage(ranks={shown(ranks)}): ranks is a whole number: write @lockstep.stage(ranks=4)"
        )
    if not 1 <= ranks <= MOST_PROCESSES:
        raise ValueError(f"stage(ranks={shown(ranks)}): a world has 1 to {MOST_PROCESSES} ranks")
    if scope not in get_args(Scope):
        raise ValueError(f"stage(scope={shown(scope)}): choose {', '.join(get_args(Scope))}")

    def make_fixture(function: Callable[..., object]) -> Any:
        _check(function)
        return pytest.fixture(scope=scope)(_find_path(Stage(function, ranks, scope)))

    return make_fixture


def _check(function: Callable[..., object]) -> None:
    if not inspect.isfunction(function):
        raise TypeError(f"stage: {function!r} is no function: put @lockstep.stage(ranks=4) above a function")
    name = function.__qualname__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"stage `{name}` yields: its world has ended the stage when the test runs. Put what needs a "
            "tear-down into a fixture that the stage requests"
        )
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"stage `{name}` is a coroutine function; write a plain one")
    if getattr(function, "pytestmark", None):
        raise TypeError(
            f"stage `{name}` has a mark: it runs with those of the test, on a world of the size that "
            "@lockstep.stage(ranks=4) names"
        )


def _find_path(stage: Stage) -> Callable[..., Path]:
    """Return the function of the fixture. It requests what the stage does, for scopes and parameters."""

    def find_path(*_: object, request: pytest.FixtureRequest, **__: object) -> Path:
        name = str(request.fixturename)
        order = session_of(request).order
        found = None if order is None else dict(order.parts.get(FEATURE, ())).get(name)
        if found is None:
            pytest.fail(
                f"the stage `{name}` has not run: a test requests it as an argument or by `usefixtures`, not "
                "by `getfixturevalue`; and what the stage itself requests cannot request it",
                pytrace=False,
            )
        path = Path(found)
        path.mkdir(parents=True, exist_ok=True)
        return path

    functools.update_wrapper(find_path, stage.function)
    signature = inspect.signature(stage.function)
    parameters = {
        name: each
        for name, each in signature.parameters.items()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    parameters.setdefault("request", inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY))
    as_any: Any = find_path
    del as_any.__wrapped__
    as_any.__signature__ = inspect.Signature([*parameters.values()])
    as_any.stage = stage
    setattr(as_any, ONLY_ON_RANKS, True)
    return find_path


def find_stage(function: Callable[..., object] | None) -> Stage | None:
    """Return the stage of which this is the function of the fixture; None if it is another fixture's."""
    found = getattr(function, "stage", None)
    return found if isinstance(found, Stage) else None
