"""Stages in the controller: their runs before a test, and what they have left.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockstep.controller.pytest_internals import fixture_of, make_report
from lockstep.controller.requests import Request, report_refusal, request_of
from lockstep.exceptions import WorldError
from lockstep.features.stages.pytest_internals import fixtures_below
from lockstep.features.stages.stage import FEATURE, KIND, Stage, find_stage
from lockstep.protocol import REPORT_PARTS, Preparation
from lockstep.world.outcome import in_preparation

Paths = tuple[tuple[str, str], ...]
"""Names of stages, with the directory that each has left."""
_KEPT = ("sections", "user_properties", "duration", "start", "stop", "wasxfail", REPORT_PARTS)
"""Attributes of a stage's report that the test's set-up gets."""


Run = Callable[[pytest.Item, Request, Preparation, Mapping[str, Any]], tuple[str, list[pytest.TestReport]]]
"""`Controller.prepare`."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stage that did not pass, so that its test does not run."""

    outcome: str
    longrepr: object
    merged: pytest.TestReport | None = None
    """The report of the stage's phase, if it came to run."""

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Return the reports of a test that requests the stage: it could not be set up."""
        setup = make_report(item, "setup", self.outcome, self.longrepr)
        if self.merged is not None:
            of_stage = vars(self.merged)
            vars(setup).update({name: of_stage[name] for name in _KEPT if name in of_stage})
        return [setup, make_report(item, "teardown", "passed")]


class Stages:
    """Runs stages of tests, and keeps what they left, or how they failed, by scope and parameters.

    Args:
        run: runs a stage for a test; returns its directory, and the reports of the stage.

    Attributes:
        names: the stages of each test that requests any, each behind those that it requests itself.
    """

    def __init__(self, run: Run) -> None:
        self.names: dict[pytest.Item, tuple[str, ...]] = {}
        self._paths: dict[pytest.Item, Paths] = {}
        self._run = run
        self._kept: dict[tuple[object, ...], str | Stopped] = {}

    def pytest_ranks_before(self, item: pytest.Item) -> list[pytest.TestReport] | None:
        """Run those stages of a test that have not run for it; unless all pass, the test does not run."""
        paths: Paths = ()
        for name in self.names.get(item, ()):
            found = self._find(item, name, paths)
            if isinstance(found, Stopped):
                return found.reports(item)
            paths = (*paths, (name, found))
        self._paths[item] = paths
        return None

    def pytest_ranks_order(self, item: pytest.Item, parts: dict[str, Any]) -> None:
        if paths := self._paths.get(item):
            parts[FEATURE] = paths

    def _find(self, item: pytest.Item, name: str, before: Paths) -> str | Stopped:
        stage = find_stage(fixture_of(item, name))
        assert stage is not None, f"{name} is no stage"
        request = request_of(item, stage.ranks)
        if not isinstance(request, Request):
            assert request is not None, "a test without the mark"
            why = f"{in_preparation(Preparation(KIND, name), stage.ranks)} {request.why}"
            setup, _ = report_refusal(item, replace(request, why=why))
            return Stopped(setup.outcome, setup.longrepr)
        key = _key(item, name, stage), request.key, before
        kept = self._kept.get(key)
        is_repeated = getattr(item, "execution_count", 1) > 1  # by pytest-rerunfailures, after a failure
        if kept is None or (is_repeated and isinstance(kept, Stopped)):
            kept = self._run_now(item, request, name, before)
            if stage.scope != "function":
                self._kept[key] = kept
        return kept

    def _run_now(self, item: pytest.Item, request: Request, name: str, before: Paths) -> str | Stopped:
        stage = Preparation(KIND, name)
        try:
            directory, reports = self._run(item, request, stage, {FEATURE: before})
        except (WorldError, pytest.fail.Exception) as error:  # the second: a plugin's own deadline
            return Stopped("failed", f"{in_preparation(stage, request.key.size)} {error}")
        bad = next((report for report in reports if not report.passed), None)
        return directory if bad is None else Stopped(bad.outcome, bad.longrepr, bad)


def _key(item: pytest.Item, name: str, stage: Stage) -> tuple[object, ...]:
    """Return what tests have in common that share one run of a stage.

    Parameters are compared by identity: `==` of tensors is no bool. A stage runs once more at worst.
    """
    kinds: dict[str, Any] = {"class": pytest.Class, "module": pytest.Module, "package": pytest.Package}
    node = item.getparent(kinds[stage.scope]) if stage.scope in kinds else None
    if node is None and stage.scope == "class":
        node = item.getparent(pytest.Module)
    params = getattr(getattr(item, "callspec", None), "params", {})
    used = tuple((each, id(params[each])) for each in fixtures_below(item, [name]) if each in params)
    return stage, node or item.session, used
