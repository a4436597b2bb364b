"""The default group of a rank: since when its collectives count, and groups that ended with a case."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.rank import process_group
from lockstep.rank.process_group import DefaultGroup, EndedGroups


class Group:
    """A process group of a test."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The time of the module, which moves on with each look at it."""
    now = itertools.count(1).__next__
    monkeypatch.setattr(process_group, "time", SimpleNamespace(time_ns=now))
    return now


@pytest.fixture
def group(tmp_path: Path) -> DefaultGroup:
    key = SimpleNamespace(backend="gloo", device="cpu", size=2, has_group=False)
    spec = SimpleNamespace(
        rank=0, key=key, place=None, gpus=(), path_of=lambda name: str(tmp_path / name), master=("", 0)
    )
    return DefaultGroup(cast(Any, spec))


def test_collectives_of_other_groups_do_not_count_while_the_group_is_hidden_and_after(
    group: DefaultGroup, clock: Callable[[], int]
) -> None:
    before = clock()
    group.hide()
    hidden = clock()
    assert not group.has_begun(before)
    assert group.has_begun(hidden)  # of the groups that there are now
    group.show()
    assert group.has_begun(before)
    assert not group.has_begun(hidden)
    assert group.has_begun(clock())


def test_collectives_of_before_the_ranks_met_do_not_count(
    group: DefaultGroup, clock: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_prepare", lambda: None)
    before = clock()
    group.join()
    assert not group.has_begun(before)
    assert group.has_begun(clock())


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that torch knows, in a list that a test fills."""
    found: list[Group] = []
    monkeypatch.setattr(process_group, "process_groups", lambda: found)
    return found


def test_groups_of_before_a_failed_case_are_named_once(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "wrap_destroy_process_group", lambda wrap: None)
    ended = EndedGroups()
    ended.begin_case()
    groups.append(Group())  # made in the case
    ended.end("n=1")
    assert ended.note == ""
    ended.begin_case()
    ended.end("n=2")
    words = "process groups and meshes that were made before case [n=2] ended when it failed"
    assert ended.note.startswith(words)
    ended.begin_case()
    ended.end("n=3")
    assert ended.note.startswith(words)


def test_groups_that_ended_with_a_case_may_be_destroyed_again(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[object] = []
    wrapped: list[Callable[..., None]] = []
    monkeypatch.setattr(
        process_group, "wrap_destroy_process_group", lambda wrap: wrapped.append(wrap(destroyed.append))
    )
    ended = EndedGroups()
    ended.end("n=0")  # there is none
    assert wrapped == []
    first, second, other = Group(), Group(), Group()
    for each in (first, second):
        groups[:] = [each]
        ended.end("n=1")
    (destroy,) = wrapped
    for group in (first, second, other, None):
        destroy(group)
    assert destroyed == [other, None]
