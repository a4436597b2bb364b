"""The plugin of adoption: gives items of existing test classes the mark `ranks`, and runs them in a rank.

Registered where `ranks_adopt` names a kind: in the controller to collect and to report, in a rank to run.
"""

from __future__ import annotations

import unittest
from collections import Counter
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from lockstep.adopt.kinds import FAMILIES, Kind, LeftAlone, NothingToRun, NotOnRanks, Place, kinds_of
from lockstep.backends import takes_devices
from lockstep.hookspecs import RANK_PLUGIN
from lockstep.options import adopted_kinds
from lockstep.protocol import SKIPS_ALL, Vote

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

__tracebackhide__ = True

_kind_key = pytest.StashKey[Kind]()
_fate_key = pytest.StashKey[str]()
_entered_key = pytest.StashKey[bool]()
_skips_all_key = pytest.StashKey[bool]()

_OUTPUT = "harness-adopted"
"""Where a worker of pytest-xdist leaves its counts for the main process."""


def register(config: pytest.Config) -> None:
    """Register the plugin of this side.

    Raises:
        pytest.UsageError: `ranks_adopt` names an unknown kind.
    """
    families = adopted_kinds(config)
    for family in families:
        if family not in FAMILIES:
            raise pytest.UsageError(f"ranks_adopt: unknown kind {family!r}; there are {', '.join(FAMILIES)}")
    kinds = kinds_of(families)
    session: RankSession | None = config.pluginmanager.get_plugin(RANK_PLUGIN)
    plugin = Adoption(config, kinds) if session is None else RankAdoption(config, session, kinds)
    config.pluginmanager.register(plugin, "harness-adopt")
    for kind in kinds:
        config.pluginmanager.register(kind)
    if config.getoption("ranks_adopt_cpu"):
        from lockstep.adopt.cpu import CpuDevices

        cpu_devices = CpuDevices(runs_here=lambda item: _kind_key in item.stash)
        config.pluginmanager.register(cpu_devices, "harness-adopt-cpu")


def _kind_of(item: pytest.Item, kinds: tuple[Kind, ...]) -> Kind | None:
    cls = getattr(item, "cls", None)
    return None if cls is None else next((kind for kind in kinds if kind.matches(cls)), None)


def _skip_all(item: pytest.Item, reason: str) -> NoReturn:
    item.stash[_skips_all_key] = True
    raise unittest.SkipTest(reason)


class Adoption:
    """Chooses what is adopted, in the controller."""

    def __init__(self, config: pytest.Config, kinds: tuple[Kind, ...]) -> None:
        self._config = config
        self._kinds = kinds
        self._fates: Counter[tuple[str, str]] = Counter()
        """Tests by class and by why the class's own launcher runs them, "" where ranks do."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        kind = _kind_of(item, self._kinds)
        if kind is None or item.get_closest_marker("ranks") is not None:
            return
        try:
            demand = kind.demand(item)
        except LeftAlone as reason:
            item.stash[_fate_key] = str(reason)
        except NotOnRanks:
            pass
        except NothingToRun as reason:
            item.add_marker(pytest.mark.skip(reason=str(reason)))
        else:
            item.stash[_fate_key] = ""
            timeout = max(demand.timeout, self._config.getoption("world_timeout"))
            item.add_marker(pytest.mark.ranks(demand.size, timeout=timeout))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        chosen = (item for item in session.items if _fate_key in item.stash)
        self._fates = Counter((item.nodeid.rpartition("::")[0], item.stash[_fate_key]) for item in chosen)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workerinput"):  # of pytest-xdist: all workers have collected the same
            self._config.workeroutput[_OUTPUT] = list(self._fates.items())  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if not self._fates:
            self._fates.update(dict(getattr(node, "workeroutput", {}).get(_OUTPUT, ())))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        left = {key: count for key, count in self._fates.items() if key[1]}
        if self._config.getoption("ranks_adopt_report") and self._fates:
            terminalreporter.section("adopted test classes", sep="-")
            for (name, reason), count in sorted(self._fates.items()):
                fate = f"left to its own launcher: {reason}" if reason else "on ranks"
                terminalreporter.write_line(f"{name}: {_tests(count)} {fate}")
        elif left:
            classes = len({name for name, _ in left})
            terminalreporter.write_line(
                f"ranks_adopt: {_tests(sum(left.values()))} of {classes} class{'es' if classes > 1 else ''} "
                "left to their own launcher (--ranks-adopt-report says why)"
            )


def _tests(count: int) -> str:
    return "1 test" if count == 1 else f"{count} tests"


class RankAdoption:
    """Runs adopted items, in a rank."""

    def __init__(self, config: pytest.Config, session: RankSession, kinds: tuple[Kind, ...]) -> None:
        from lockstep.adopt.groups import ForeignGroups

        self._session = session
        self._kinds = kinds
        self._groups = ForeignGroups(session.rank.group)
        if config.getini("ranks_adopt_groups") == "reuse" and not takes_devices(session.world.backend):
            self._groups.reuse_default(session.world)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        kind = _kind_of(item, self._kinds)
        if kind is not None and item.get_closest_marker("ranks") is None:
            item.stash[_kind_key] = kind

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._groups.drop_ended()
        return (yield)

    # Inside of the guards of the rank, so that they see the rank's own groups before and after.

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if kind := item.stash.get(_kind_key, None):
            self._groups.enter(kind.owner_of_groups(item))
            item.stash[_entered_key] = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if (kind := item.stash.get(_kind_key, None)) is None:
            return (yield)
        with kind.running(item, self._place(item)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if (kind := item.stash.get(_kind_key, None)) and item.stash.get(_entered_key, False):
                item.stash[_entered_key] = False
                owner = kind.owner_of_groups(item)
                self._groups.leave(None if owner is item else owner)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and item.stash.get(_skips_all_key, False):
            vars(report)[SKIPS_ALL] = True
        return report

    def _place(self, item: pytest.Item) -> Place:
        world = self._session.world
        return Place(
            rank=world.rank,
            size=world.size,
            device=world.device.type,
            directory=str(world.shared_tmp_path),
            end_groups=self._groups.end,
            fail_peers=self._session.rank.abort,
            skip_all=partial(_skip_all, item),
            any_rank=self._any_rank,
        )

    def _any_rank(self, value: bool) -> bool:
        votes = self._session.rank.agree(Vote("the expected failure", "failed" if value else "passed"))
        return any(vote.outcome == "failed" for vote in votes)
