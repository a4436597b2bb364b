"""Process groups of adopted tests, kept for the next test of the same class."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.features.adopt import groups as module
from lockstep.features.adopt.groups import MAX_KEPT, ForeignGroups


class HiddenGroup:
    """The default group of a rank: each time it is hidden, a test makes groups that are numbered."""

    def __init__(self) -> None:
        self.number = 0
        self.put_back: list[int] = []
        self.shut_down: list[int] = []

    def hide(self) -> None:
        self.number += 1

    def show(self) -> Any:
        number = self.number
        return SimpleNamespace(
            put_back=lambda: self.put_back.append(number), shut_down=lambda: self.shut_down.append(number)
        )


def test_the_groups_of_the_four_latest_owners_are_kept() -> None:
    group = HiddenGroup()
    groups = ForeignGroups(cast(Any, group))
    for owner in "abcde":
        groups.enter(owner)
        groups.leave(keep_for=owner)
    groups.drop_ended()
    assert (MAX_KEPT, group.shut_down) == (4, [1])
    groups.enter("b")
    assert group.put_back == [2]
    groups.leave(keep_for="b")
    groups.enter("f")
    groups.leave(keep_for="f")
    groups.drop_ended()
    assert group.shut_down == [1, 3]
    groups.enter("a")  # makes its own again
    groups.leave()
    groups.drop_ended()
    assert group.put_back == [2]
    assert group.shut_down == [1, 3, 8]


def test_ended_groups_live_until_they_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    taken = SimpleNamespace(shut_down=lambda: ended.append("down"))
    monkeypatch.setattr(module, "take_groups", lambda: taken)
    groups = ForeignGroups(cast(Any, HiddenGroup()))
    groups.end()
    assert ended == []
    for _ in range(2):
        groups.drop_ended()
    assert ended == ["down"]


def test_the_hook_of_exceptions_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", before := lambda *_: None)
    groups = ForeignGroups(cast(Any, HiddenGroup()))
    groups.enter("a")
    sys.excepthook = print
    groups.leave()
    assert sys.excepthook is before


def test_the_ranks_group_is_lent_to_a_test_that_asks_for_one_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def replace(make: Any) -> Any:
        made.append(make)
        return lambda *given, **options: ("new", given, options)

    monkeypatch.setattr(module, "replace_group_maker", replace)
    monkeypatch.setattr(module, "is_default_timeout", lambda timeout, backend: timeout in (None, backend))
    group: Any = HiddenGroup()
    group.lend = lambda store: f"lent over {store}"
    groups = ForeignGroups(group)
    groups.reuse_default(cast(Any, SimpleNamespace(size=2, rank=1, backend="gloo")))
    (make,) = made
    alike = (2, 1, [], "gloo", "store")
    assert make(*alike, 5, a=6) == ("new", (*alike, 5), {"a": 6})
    groups.enter("owner")
    lent = ("lent over store", "store")
    assert make(*alike) == make(2, 1, [], "undefined", "store", timeout="gloo") == lent
    for other in ((3, *alike[1:]), (2, 0, *alike[2:]), (2, 1, [0], *alike[3:]), (2, 1, [], "mpi", "store")):
        assert make(*other) == ("new", other, {})
    for options in ({"device_id": 0}, {"backend_options": 1}, {"timeout": 5}):
        assert make(*alike, **options) == ("new", alike, options)
    groups.leave()
    assert make(*alike)[0] == "new"
