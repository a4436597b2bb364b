"""Adopted items, run in a rank."""

from __future__ import annotations

import unittest
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from lockstep.backends import takes_devices
from lockstep.features.adopt.groups import ForeignGroups
from lockstep.features.adopt.kinds import KIND, AdoptedKind, RankOfItem, kind_of
from lockstep.protocol import SKIPS_ALL, Vote

if TYPE_CHECKING:
    from lockstep.rank.session import RankSession

__tracebackhide__ = True

_entered_key = pytest.StashKey[bool]()
_skips_all_key = pytest.StashKey[bool]()


def _skip_all(item: pytest.Item, reason: str) -> NoReturn:
    item.stash[_skips_all_key] = True
    raise unittest.SkipTest(reason)


class RankAdoption:
    """Runs adopted items, in a rank."""

    def __init__(self, config: pytest.Config, session: RankSession, kinds: tuple[AdoptedKind, ...]) -> None:
        self._session = session
        self._kinds = kinds
        self._groups = ForeignGroups(session.rank.group)
        session.rank.status.count_as_pytest(str(Path(__file__).parent))
        if config.getini("ranks_adopt_groups") == "reuse" and not takes_devices(session.world.backend):
            self._groups.reuse_default(session.world)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        kind = kind_of(item, self._kinds)
        if kind is not None and item.get_closest_marker("ranks") is None:
            item.stash[KIND] = kind

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._groups.drop_ended()
        return (yield)

    # Inside of the guards of the rank, so that they see the rank's own groups before and after.

    @pytest.hookimpl
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if kind := item.stash.get(KIND, None):
            self._groups.enter(kind.owner_of_groups(item))
            item.stash[_entered_key] = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        if (kind := item.stash.get(KIND, None)) is None:
            return (yield)
        with kind.running(item, self._place(item)):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            if (kind := item.stash.get(KIND, None)) and item.stash.get(_entered_key, False):
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

    def _place(self, item: pytest.Item) -> RankOfItem:
        world = self._session.world
        return RankOfItem(
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
