"""Injected faults in a rank's pytest session, once a test has used the fixture. Inside a rank."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager

import pytest

from lockstep.backends import meets
from lockstep.features.injection.injector import Faults, injected_hang
from lockstep.features.injection.lost_peers import LostPeers
from lockstep.features.injection.messages import FEATURE
from lockstep.protocol import Part
from lockstep.rank.session import RankSession

_injected_faults: pytest.StashKey[InjectedFaults] = pytest.StashKey()


class InjectedFaults:
    """A plugin of the session: checks the faults that tests inject, and ends them.

    Attributes:
        faults: the value of the fixture.
    """

    def __init__(self, session: RankSession) -> None:
        self._lost_peers = LostPeers()
        self.faults = Faults(session.rank, session.world, self._lost_peers)
        session.rank.status.name_call(injected_hang.__name__, "an injected hang")

    def pytest_ranks_part(self, part: Part) -> None:
        if part.feature == FEATURE:
            self._lost_peers.note(part.data.rank)

    def pytest_ranks_regrouped(self) -> None:
        self._lost_peers.clear()

    def pytest_ranks_called(self) -> None:
        self.faults.check()

    def pytest_ranks_example(self) -> AbstractContextManager[None]:
        return self.faults.example()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, object, object]:
        self.faults.end()
        result = yield
        self.faults.end()  # those of fixtures that inject them in their tear-down
        return result


def faults_of(session: RankSession, config: pytest.Config) -> Faults:
    """Return the value of the fixture `faults`."""
    if not meets(session.world.backend):
        pytest.fail("the fixture `faults` has nothing to disturb in a fake world", pytrace=False)
    if _injected_faults not in config.stash:
        config.stash[_injected_faults] = InjectedFaults(session)
        config.pluginmanager.register(config.stash[_injected_faults])
    return config.stash[_injected_faults].faults
