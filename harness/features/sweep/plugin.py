"""The plugin of sweeps: the fixture `sweep`, its options, and the division of points among workers."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.hookspecs import CONTROLLER_PLUGIN, RANK_PLUGIN
from lockstep.rank_session import session_of

if TYPE_CHECKING:
    from lockstep.features.sweep.sweep import Sweep

_SWEEPS = "harness-sweeps"
_has_sweeps = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption(
        "--sweep-points",
        metavar="NUMBER|all",
        help="points that each sweep runs, drawn by the seed over all kinds, ranks and phases (default: that "
        "of the ini option)",
    )
    parser.addini("ranks_sweep_points", "points that each sweep runs, or all", default="100")
    group.addoption(
        "--sweep-seconds",
        type=float,
        metavar="SECONDS",
        help="seconds after which a sweep begins no further point",
    )
    group.addoption(
        "--sweep-point",
        metavar="NAME",
        help="run one point of a sweep alone, as its report names it: 'kill rank 1 collective 7'",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options.

    Raises:
        pytest.UsageError: with what was wrong and what to write.
    """
    options = config.option
    given = {
        "--sweep-points": options.sweep_points or "all",
        "ranks_sweep_points =": config.getini("ranks_sweep_points"),
    }
    for name, points in given.items():
        if points != "all" and not (points.isdecimal() and len(points) < 10 and int(points) > 0):
            raise pytest.UsageError(f"{name} {points!r:.60}: a number from 1, or all")
    if (seconds := options.sweep_seconds) is not None:
        from lockstep.bounds import SECONDS, are_seconds

        if not are_seconds(seconds):
            raise pytest.UsageError(f"--sweep-seconds {seconds}: {SECONDS}")
    if options.sweep_point is not None:
        from lockstep.features.sweep.points import Point

        try:
            Point.parse(options.sweep_point)
        except ValueError as error:
            raise pytest.UsageError(f"--sweep-point {error}") from None


@pytest.fixture
def sweep(request: pytest.FixtureRequest) -> Sweep:
    """A fault at every collective and every operation on a file of a function, on every rank."""
    session = session_of(request)
    from lockstep.features.sweep.sweeps import sweep_of

    return sweep_of(session, request.config, getattr(request, "param", (0, 1)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item of each part of a sweep, one for each worker of pytest-xdist."""
    if "sweep" not in metafunc.fixturenames or metafunc.config.option.sweep_point is not None:
        return
    from lockstep.controller.pytest_internals import fixture_function

    function = fixture_function(metafunc, "sweep")
    parts = _num_workers(metafunc.config)
    if parts > 1 and getattr(function, "__module__", "") == __name__:
        from lockstep.features.sweep.parts import id_of_part

        ids = [id_of_part(number, parts) for number in range(parts)]
        metafunc.parametrize("sweep", [(number, parts) for number in range(parts)], indirect=True, ids=ids)


def _num_workers(config: pytest.Config) -> int:
    session: Any = config.pluginmanager.get_plugin(RANK_PLUGIN)
    given: Any = getattr(config, "workerinput", None)
    if session is not None:  # which is a worker of its own in any case
        given = session.rank.spec.session.workerinput
    return 1 if given is None or given["workerid"] == "master" else int(given["workercount"])


# In the controller


def pytest_ranks_mentioned(config: pytest.Config, text: bytes) -> None:
    """Note that a file may have sweeps: the server then imports what each new rank needs for them."""
    config.stash[_has_sweeps] = config.stash.get(_has_sweeps, False) or b"sweep" in text


def pytest_ranks_imports(config: pytest.Config, hints: list[str]) -> None:
    if config.stash.get(_has_sweeps, False):
        hints.append("lockstep.features.sweep.sweeps")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Register the half of the controller once there is a test with a sweep."""
    manager = config.pluginmanager
    if not manager.hasplugin(CONTROLLER_PLUGIN) or manager.hasplugin(_SWEEPS):
        return
    if any("sweep" in getattr(item, "fixturenames", ()) for item in items):
        from lockstep.features.sweep.controller import Budget, Sweeps
        from lockstep.features.sweep.points import Point

        options = config.option
        wanted = options.sweep_points or config.getini("ranks_sweep_points")
        only = None if options.sweep_point is None else Point.parse(options.sweep_point)
        points = None if wanted == "all" else int(wanted)
        budget = Budget(points, options.sweep_seconds, only, config.getoption("world_seed"))
        manager.register(Sweeps(budget), _SWEEPS)


def pytest_ranks_rerun(item: pytest.Item) -> list[str] | None:
    """Leave out which part of a sweep a worker had: without workers there are none."""
    if "sweep" not in getattr(getattr(item, "callspec", None), "params", {}):
        return None
    from lockstep.features.sweep.parts import without_part

    return [without_part(item.nodeid)]


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
    result = yield
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if any(name == "sweep" for each in reports for name, _ in getattr(each, "user_properties", ())):
        from lockstep.features.sweep.controller import lines

        for line in lines(reports):
            terminalreporter.write_line(line)
    return result
