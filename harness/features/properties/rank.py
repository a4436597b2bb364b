"""Property tests in a rank's pytest session, kept in step once a test file has imported Hypothesis."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.features.properties.messages import CRASHED, FEATURE, NOTES, STATISTICS
from lockstep.protocol import RERUN_OPTIONS

if TYPE_CHECKING:
    from lockstep.features.properties.examples import Examples
    from lockstep.protocol import RunItem
    from lockstep.rank.process import Rank

__tracebackhide__ = True  # frames of hooks do not belong into a test's traceback


class Properties:
    """The property tests of one rank: a plugin of its session. Imports Hypothesis only after a test file."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._records = True
        self._examples: Examples | None = None
        self._unsupported = ""

    def pytest_configure(self, config: pytest.Config) -> None:
        self._records = not config.getoption("ranks_no_divergence", False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_ranks_run_item(self, order: RunItem) -> Generator[None, object, object]:
        """Keep the properties of one item in step."""
        if "hypothesis" in sys.modules and not self._unsupported:
            self._examples = self._examples or self._start()
        if self._examples is None:
            return (yield)
        self._examples.begin_item(order.parts[FEATURE])
        try:
            return (yield)
        finally:
            self._examples.is_active = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._unsupported and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            pytest.fail(self._unsupported, pytrace=False)

    def _start(self) -> Examples | None:
        try:
            return self._keep_in_step()
        except (ImportError, AttributeError) as error:
            version = sys.modules["hypothesis"].__version__
            self._unsupported = (
                f"property tests do not run on ranks with Hypothesis {version}: {error}. They use private "
                "parts of Hypothesis, all of which release 6.170 has"
            )
            return None

    def _keep_in_step(self) -> Examples:
        from lockstep.features.properties.examples import Examples
        from lockstep.features.properties.execution import keep_in_step

        examples = Examples(self._rank, self._records)
        keep_in_step(examples)
        if (hypothesis := sys.modules["hypothesis"].__file__) is not None:
            self._rank.status.hide_frames(str(Path(hypothesis).parent), str(Path(__file__).parent))
        return examples

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add to a report what the controller needs of a property; rank 0 alone adds the statistics."""
        __tracebackhide__ = True
        statistics = getattr(item, "hypothesis_statistics", None)
        if statistics is not None and self._rank.spec.rank:
            del item.hypothesis_statistics  # type: ignore[attr-defined]
        report = yield
        if self._examples is not None and call.excinfo is not None:
            vars(report).update(self._facts(self._examples, call.excinfo.value))
        if statistics is not None and report.when == "teardown" and not self._rank.spec.rank:
            vars(report)[STATISTICS] = statistics
        return report

    def _facts(self, examples: Examples, error: BaseException) -> dict[str, Any]:
        from lockstep.features.properties.crashed import RankCrashed

        facts: dict[str, Any] = {}
        if notes := getattr(error, "__notes__", None):
            facts[NOTES] = "\n".join(notes)
        if examples.seed is not None:
            facts[RERUN_OPTIONS] = f" --hypothesis-seed={examples.seed}"
        if isinstance(error, RankCrashed):
            facts[CRASHED] = error.index
        return facts
