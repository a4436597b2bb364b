"""Choice of what is adopted and what is left to its own launcher. Runs in the controller."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from lockstep.features.adopt.kinds import AdoptedKind, LeftAlone, NothingToRun, NotOnRanks, kind_of

_fate_key = pytest.StashKey[str]()

_OUTPUT = "harness-adopted"
"""Key under which a worker of pytest-xdist leaves its counts for the main process."""


class Adoption:
    """Chooses what is adopted, in the controller."""

    def __init__(self, config: pytest.Config, kinds: tuple[AdoptedKind, ...]) -> None:
        self._config = config
        self._kinds = kinds
        self._fates: Counter[tuple[str, str]] = Counter()
        """Tests by class and by why the class's own launcher runs them, "" where ranks do."""

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        kind = kind_of(item, self._kinds)
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
