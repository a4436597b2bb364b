"""Unit tests of adopted items in a rank: when their groups are up, and how they skip and vote."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.features.adopt import rank
from lockstep.features.adopt.kinds import KIND, RankOfItem
from lockstep.features.adopt.rank import RankAdoption
from lockstep.protocol import SKIPS_ALL, Vote

MET: list[object] = []


class Groups:
    """Writes down when groups of tests are up."""

    def __init__(self, group: object) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return lambda *given: MET.append((name, *given))


class Kind:
    """A kind of the classes that have an owner of groups."""

    family = "torch"

    def matches(self, cls: type) -> bool:
        return hasattr(cls, "owner")

    def owner_of_groups(self, item: Any) -> object:
        return item.cls.owner or item

    @contextlib.contextmanager
    def running(self, item: object, place: RankOfItem) -> Iterator[None]:
        MET.append("begin")
        yield
        MET.append(place)


class Item:
    def __init__(self, cls: Any, mark: object = None) -> None:
        self.cls, self.stash, self.mark = cls, pytest.Stash(), mark

    def get_closest_marker(self, name: str) -> object:
        return self.mark if name == "ranks" else None


OF_CLASS, OF_ITEM = type("A", (), {"owner": "A"}), type("B", (), {"owner": None})
WORLD = SimpleNamespace(
    rank=1, size=2, device=SimpleNamespace(type="cpu"), shared_tmp_path="/shared", backend="gloo"
)


@pytest.fixture
def adoption(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rank, "ForeignGroups", Groups)
    MET.clear()
    return made("own")


def made(groups: str, backend: str = "gloo") -> RankAdoption:
    status = SimpleNamespace(count_as_pytest=lambda path: MET.append(path.rpartition("/")[2]))
    of_session = SimpleNamespace(group="group", status=status, abort="abort")
    world = SimpleNamespace(**vars(WORLD) | {"backend": backend})
    session: Any = SimpleNamespace(rank=of_session, world=world)
    config: Any = SimpleNamespace(getini={"ranks_adopt_groups": groups}.__getitem__)
    return RankAdoption(config, session, (Kind(),))


def collected(adoption: Any, cls: Any, mark: object = None) -> Any:
    item: Any = Item(cls, mark)
    adoption.pytest_itemcollected(item)
    return item


def through(hook: Any, sent: object = "result") -> Any:
    """Return the result of a wrapper around what returns `sent`."""
    next(hook)
    with pytest.raises(StopIteration) as end:
        hook.send(sent)
    return end.value.value


def test_the_ranks_own_groups_are_lent_where_that_is_asked_for(adoption: Any) -> None:
    assert adoption._groups.group == "group"
    assert MET == ["adopt"]
    world = made("reuse")._session.world
    made("reuse", "nccl")
    assert ["adopt", "adopt", ("reuse_default", world), "adopt"] == MET


def test_items_of_a_kind_are_adopted_unless_they_have_the_mark(adoption: Any) -> None:
    items = [collected(adoption, *given) for given in ((OF_ITEM,), (OF_ITEM, "mark"), (int,), (None,))]
    assert [KIND in item.stash for item in items] == [True, False, False, False]


def test_groups_are_up_from_the_set_up_to_the_tear_down(adoption: Any) -> None:
    MET.clear()
    of_class, of_item = collected(adoption, OF_CLASS), collected(adoption, OF_ITEM)
    other = collected(adoption, int)
    for item in (of_class, of_item, other):
        assert through(adoption.pytest_runtest_teardown(item)) == "result"
        adoption.pytest_runtest_setup(item)
        for _ in range(2):
            assert through(adoption.pytest_runtest_teardown(item)) == "result"
    assert [("enter", "A"), ("leave", "A"), ("enter", of_item), ("leave", None)] == MET
    assert through(adoption.pytest_runtest_protocol()) == "result"
    assert MET[4:] == [("drop_ended",)]


def test_groups_are_put_away_where_the_tear_down_fails(adoption: Any) -> None:
    item = collected(adoption, OF_CLASS)
    adoption.pytest_runtest_setup(item)
    tearing_down = adoption.pytest_runtest_teardown(item)
    next(tearing_down)
    with pytest.raises(ValueError, match="no"):
        tearing_down.throw(ValueError("no"))
    assert MET[-1] == ("leave", "A")


def test_a_call_is_surrounded_by_its_kind(adoption: Any) -> None:
    MET.clear()
    assert through(adoption.pytest_runtest_call(collected(adoption, int))) == "result"
    assert MET == []
    assert through(adoption.pytest_runtest_call(collected(adoption, OF_ITEM))) == "result"
    begin, place = MET
    assert begin == "begin"
    assert isinstance(place, RankOfItem)
    assert (place.rank, place.size, place.device, place.directory) == (1, 2, "cpu", "/shared")
    assert place.fail_peers == "abort"  # type: ignore[comparison-overlap]
    place.end_groups()
    assert MET[2:] == [("end",)]


def test_a_skip_of_all_ranks_is_marked_in_the_report(adoption: Any) -> None:
    skips, other = collected(adoption, OF_ITEM), collected(adoption, OF_ITEM)
    with pytest.raises(unittest.SkipTest, match=r"^why$"):
        adoption._place(skips).skip_all("why")
    for item, skipped, expected in ((skips, True, True), (skips, False, None), (other, True, None)):
        report = SimpleNamespace(skipped=skipped)
        assert through(adoption.pytest_runtest_makereport(item), report) is report
        assert getattr(report, SKIPS_ALL, None) is expected


def test_ranks_agree_on_an_expected_failure(adoption: Any) -> None:
    votes: list[Vote] = []
    others = [Vote("x", "passed")]
    adoption._session.rank.agree = lambda vote: votes.append(vote) or [vote, *others]
    any_rank = adoption._place(collected(adoption, OF_ITEM)).any_rank
    assert [any_rank(True), any_rank(False)] == [True, False]
    others.append(Vote("x", "failed"))
    assert any_rank(False) is True
    assert votes[:2] == [Vote("the expected failure", "failed"), Vote("the expected failure", "passed")]
