"""Process groups of adopted tests, kept for the next test of the same class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

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
