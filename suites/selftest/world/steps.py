"""A run of an item of which a test calls single steps, and its ranks, which record what they are sent."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pluggy import PluginManager

from lockstep import feature_hooks
from lockstep.flight_entries import DEFAULT_GROUP
from lockstep.protocol import Finished, Issued, Part, Progress, RankStatus, Reported, RunItem, Vote, Warned
from lockstep.world.item_run import ItemRun
from lockstep.world.outcome import Died, RankOutcome
from lockstep.world.standstill import Probes

ORDER = RunItem("test_a.py::test_a[1]", "test_a.py", None, "")
FINISHED = Finished(True, 0, 0)
DEAD = Died(-9, "", 0.0)
WARNED = Warned("m", "UserWarning", "text", "file", 1)


def report(outcome: str, when: str = "call", **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "when": when, "$report_type": "TestReport", "longrepr": "", **more}


PASSED = [Reported(report("passed", when)) for when in ("setup", "call", "teardown")]
FAILED = Reported(report("failed"))


def waits_in(op: str, number: int = 1, **changes: Any) -> RankStatus:
    begun = Issued(DEFAULT_GROUP, (), number, op, ("float",), ((3,),), in_flight=True)
    return RankStatus("", f"a.py:{number} in f", issued=(begun,), **changes)


class Rank:
    """A handle on a rank that records what is sent to it, and answers a whole probe at once."""

    def __init__(self, rank: int) -> None:
        self.rank, self.host, self.spec, self.died = rank, "", None, None
        self.sent: list[Any] = []
        self.answer: Any = RankStatus("", "nowhere", state="silent")
        self.stopped = self.killed = False
        self.phases = 0
        self.signals: list[int] = []
        self.started = SimpleNamespace(kill=lambda: setattr(self, "killed", True), signal=self.signals.append)
        self.wire, self._own = multiprocessing.Pipe()

    def send_packed(self, message: Any) -> None:
        self.sent.append(pickle.loads(message))

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def sources(self) -> tuple[Any, ...]:
        return ()

    def is_stopped(self) -> bool:
        return self.stopped

    def describe_silent(self) -> Any:
        return self.answer

    def phases_over(self) -> int:
        return self.phases

    def log(self) -> str:
        return f"log of {self.rank}"

    def output(self) -> Any:
        return SimpleNamespace(captured=lambda: (("stdout", f"printed by {self.rank}"),))


class Feature:
    """A feature that records the calls of its hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.excuse: str | None = None
        self.lost: set[int] | None = None
        self.votes: Sequence[Vote] = ()
        self.waits: dict[int, str] = {}

    @pytest.hookimpl
    def pytest_ranks_message(self, rank: int, part: Part) -> None:
        self.calls.append(("message", rank, part))

    @pytest.hookimpl
    def pytest_ranks_answer(self, rank: int, answer: RankStatus | Progress) -> None:
        self.calls.append(("answer", rank, answer))

    @pytest.hookimpl
    def pytest_ranks_probe(self, silent: set[int]) -> bool:
        self.calls.append(("probe", silent))
        return True

    @pytest.hookimpl
    def pytest_ranks_died(self, rank: int, death: Died) -> str | None:
        self.calls.append(("died", rank, death))
        return self.excuse

    @pytest.hookimpl
    def pytest_ranks_waits(self, statuses: Mapping[int, RankStatus]) -> dict[int, str]:
        return self.waits

    @pytest.hookimpl
    def pytest_ranks_standstill(self, found: Any, pending: set[int]) -> set[int] | None:
        self.calls.append(("standstill", set(pending)))
        return self.lost

    @pytest.hookimpl
    def pytest_ranks_agreed(self, votes: Sequence[Vote], parts: dict[str, Any]) -> None:
        self.votes = votes
        parts["mine"] = len(votes)

    @pytest.hookimpl
    def pytest_ranks_outcome(self, outcome: Any) -> None:
        self.calls.append(("outcome", outcome))

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class Steps(ItemRun):
    """A run whose steps a test calls, and whose ranks answer the request for their whole status at once."""

    def __init__(self, count: int = 2, timeout: float = 60.0, order: RunItem = ORDER) -> None:
        self.feature = Feature()
        manager = PluginManager("pytest")
        manager.add_hookspecs(feature_hooks)
        manager.register(self.feature)
        super().__init__(order, timeout, manager.hook)
        self.ranks = [Rank(number) for number in range(count)]
        self._handles: Any = self.ranks
        self._probes = Probes(self._handles)
        self.outcomes = [RankOutcome(number) for number in range(count)]

    def take(self, rank: int, *messages: Any) -> None:
        for message in messages:
            self._handle(rank, message)

    def request_statuses(self, ranks: set[int]) -> dict[int, RankStatus]:
        self.asked = set(ranks)
        return {rank: self.ranks[rank].answer for rank in ranks}

    def probe_twice(self, *answers: RankStatus) -> None:
        for _ in range(2):
            for rank, answer in enumerate(answers):
                self._probes.take(rank, answer)
            self._probe(self._pending())

    def sent(self, kind: type) -> list[list[Any]]:
        return [[each for each in rank.sent if isinstance(each, kind)] for rank in self.ranks]
