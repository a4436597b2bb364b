"""The plugin of stages: they run before the test that requests them, and leave it a directory each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lockstep.controller.pytest_internals import fixture_of
from lockstep.features.stages.stage import FEATURE, KIND, LEFT, find_stage
from lockstep.hookspecs import CONTROLLER_PLUGIN
from lockstep.pytest_internals import fixtures_below

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal, Request
    from lockstep.features.stages.controller import Paths, Stages
    from lockstep.marker import RanksMark
    from lockstep.protocol import RunItem

_stages: pytest.StashKey[Stages] = pytest.StashKey()
_names: pytest.StashKey[tuple[str, ...]] = pytest.StashKey()
_paths: pytest.StashKey[Paths] = pytest.StashKey()

# In the controller


def pytest_ranks_request(item: pytest.Item, mark: RanksMark, request: Request) -> Refusal | None:
    names = _stages_of(item)
    if not names:
        return None
    if request.key.backend == "fake":
        from lockstep.controller.requests import Refusal

        why = f"the test has a stage (`{names[0]}`), and a fake world is one process that receives nothing"
        return Refusal("skipped" if mark.backend is None else "failed", why)
    item.stash[_names] = names
    return None


def pytest_ranks_before(item: pytest.Item) -> list[pytest.TestReport] | None:
    """Run those stages of a test that have not run for it; if one does not pass, the test does not run."""
    if not (names := item.stash.get(_names, ())):
        return None
    from lockstep.features.stages.controller import Stages, Stopped

    if (stages := item.config.stash.get(_stages, None)) is None:
        controller: Any = item.config.pluginmanager.get_plugin(CONTROLLER_PLUGIN)
        stages = item.config.stash[_stages] = Stages(controller.prepare)
    found = stages.prepare(item, names)
    if isinstance(found, Stopped):
        return found.reports(item)
    item.stash[_paths] = found
    return None


def pytest_ranks_order(item: pytest.Item, parts: dict[str, Any]) -> None:
    if paths := item.stash.get(_paths, None):
        parts[FEATURE] = paths


def _stages_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the names of the stages that an item requests, each behind those that it requests itself."""
    names = getattr(item, "fixturenames", ())
    if not any(find_stage(fixture_of(item, name)) for name in names):
        return ()
    below = fixtures_below(item, names)
    return tuple(name for name in below if name in names and find_stage(fixture_of(item, name)))


# In a rank


def pytest_ranks_item(item: pytest.Item, order: RunItem) -> pytest.Item | None:
    """Run a stage in the place of the test, where that is ordered."""
    item.config.stash[LEFT] = dict(order.parts.get(FEATURE, ()))
    if order.preparation is None or order.preparation.kind != KIND:
        return None
    from lockstep.features.stages.pytest_internals import make_stage

    return make_stage(item, order.preparation.name)
