"""The plugin of stages: they run before the test that requests them, and leave it a directory each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lockstep.backends import meets
from lockstep.controller.pytest_internals import fixture_of
from lockstep.features.stages.pytest_internals import fixtures_below
from lockstep.features.stages.stage import KIND, find_stage
from lockstep.hookspecs import CONTROLLER_PLUGIN

if TYPE_CHECKING:
    from lockstep.controller.requests import Refusal, Request
    from lockstep.features.stages.controller import Stages
    from lockstep.marker import RanksMark
    from lockstep.protocol import RunItem

_stages: pytest.StashKey[Stages] = pytest.StashKey()

# In the controller


def pytest_ranks_request(item: pytest.Item, mark: RanksMark, request: Request) -> Refusal | None:
    names = _stages_of(item)
    if not names:
        return None
    if not meets(request.key.backend):
        from lockstep.controller.requests import Refusal

        why = f"the test has a stage (`{names[0]}`), and a fake world is one process that receives nothing"
        return Refusal("skipped" if mark.backend is None else "failed", why)
    if (stages := item.config.stash.get(_stages, None)) is None:
        from lockstep.features.stages.controller import Stages

        controller: Any = item.config.pluginmanager.get_plugin(CONTROLLER_PLUGIN)
        stages = item.config.stash[_stages] = Stages(controller.prepare)
        item.config.pluginmanager.register(stages)
    stages.names[item] = names
    return None


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
    if order.preparation is None or order.preparation.kind != KIND:
        return None
    from lockstep.features.stages.pytest_internals import make_stage

    return make_stage(item, order.preparation.name)
