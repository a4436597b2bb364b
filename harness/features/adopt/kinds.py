"""The kinds of test classes that can be adopted, and what each must know. Used on both sides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NoReturn, Protocol

import pytest

RANKS_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets, as ranks have them, and a process of another launcher has not at first."""


class LeftAlone(Exception):
    """The reason for which a class or a test is left to its own launcher."""


class NothingToRun(Exception):
    """The reason for which a test is skipped before any rank is asked."""


class NotOnRanks(Exception):
    """The item is skipped anyway, by `unittest.skip` for example: no rank need start for that."""


def is_skipped(test: object) -> bool:
    """Return whether `unittest.skip`, or what calls it, is on a class or a method."""
    return bool(getattr(test, "__unittest_skip__", False))


@dataclass(frozen=True, slots=True)
class Demand:
    """The world that an adopted item needs."""

    size: int
    timeout: float = 0.0
    """Seconds; `--world-timeout` holds where it is longer."""


@dataclass(frozen=True, slots=True)
class RankOfItem:
    """The rank that an adopted item runs on, as kinds see it."""

    rank: int
    size: int
    device: str
    """Type of the device that the rank's tensors belong to: cpu or cuda."""
    directory: str
    """One directory of this item for all ranks, which exists."""
    end_groups: Callable[[], None]
    """Make torch forget the test's process groups; they are shut down when all ranks have ended the item."""
    fail_peers: Callable[[], None]
    """Break the connections of this rank, so that ranks that wait for it fail at once."""
    skip_all: Callable[[str], NoReturn]
    """Skip the test for a reason that, as the kind's own launcher judges it, skips it on all ranks."""
    any_rank: Callable[[bool], bool]
    """Return, when all ranks have called this, whether one of them gave true."""


class AdoptedKind(Protocol):
    """One kind of test classes. It is registered as a plugin too, and may have hooks of pytest's.

    Attributes:
        family: the word of `ranks_adopt` that asks for it.
    """

    family: str

    def matches(self, cls: type) -> bool:
        """Return whether a class is of this kind. Called for each item that is collected."""
        ...

    def demand(self, item: pytest.Item) -> Demand:
        """Return what an item asks for. Called in the controller.

        Raises:
            LeftAlone: the item, or its class, stays with its own launcher.
            NothingToRun: the item is skipped.
            NotOnRanks: pytest runs the item as any other.
        """
        ...

    def owner_of_groups(self, item: pytest.Item) -> object:
        """Return the owner of the process groups of an item: the item, or its class if they outlive it."""
        ...

    def running(self, item: pytest.Item, place: RankOfItem) -> AbstractContextManager[None]:
        """Surround the call phase of an item in a rank; the item's own groups are up, or none."""
        ...


KIND = pytest.StashKey[AdoptedKind]()
"""Kind of an item that is adopted, in a rank."""


def kind_of(item: pytest.Item, kinds: tuple[AdoptedKind, ...]) -> AdoptedKind | None:
    """Return the first of the kinds that the class of an item is of; None if it is of none."""
    cls = getattr(item, "cls", None)
    return None if cls is None else next((kind for kind in kinds if kind.matches(cls)), None)
