"""A rank with and without a Hypothesis that is supported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.features.properties.messages import FEATURE, Search
from lockstep.features.properties.rank import Properties
from lockstep.rank.world_fixture import RankWorld
from lockstep.specification import RankSpec, SessionSpec, WorldKey


def test_a_rank_picks_its_own_and_too_few_values_are_refused() -> None:
    session = SessionSpec((), "", (), (), {}, {}, captures=False)
    world = RankWorld(RankSpec(1, WorldKey(2, "gloo", "cpu"), session, 0, "", ""), torch.device("cpu"))
    assert world.pick(["a", "b", "c"]) == "b"
    with pytest.raises(ValueError, match=r"world.pick: 1 values for 2 ranks; draw at least world.size"):
        world.pick(["a"])


def test_an_unsupported_hypothesis_fails_property_tests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_in_step(self: Properties) -> None:
        raise AttributeError("module 'hypothesis.core' has no attribute 'State'")

    monkeypatch.setattr(Properties, "_keep_in_step", keep_in_step)
    rank: Any = None
    plain: Any = SimpleNamespace(obj=print)
    drawn: Any = SimpleNamespace(obj=SimpleNamespace(is_hypothesis_test=True))
    properties = Properties(rank)
    order: Any = SimpleNamespace(parts={FEATURE: Search()})
    next(properties.pytest_ranks_run_item(order))
    properties.pytest_runtest_setup(plain)
    said = r"do not run on ranks with Hypothesis \d.*: module 'hypothesis.core' has no attribute 'State'"
    with pytest.raises(pytest.fail.Exception, match=said):
        properties.pytest_runtest_setup(drawn)
