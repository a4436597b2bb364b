"""The `ranks` marker: what it may say, and what is wrong with it where it says something else.

Used on both sides at collection; must not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

NEEDS = {"values": "that a rank receives what the others have sent"}
"""Needs of a test, by the word for each in its mark; each backend names those it lacks."""


class MarkError(ValueError):
    """A `ranks` mark that no world can satisfy."""


@dataclass(frozen=True, slots=True)
class RanksMark:
    """A validated mark `ranks(*sizes, backend=None, fresh=False, timeout=None, needs=("values",), ...)`."""

    sizes: tuple[int, ...]
    backend: str | None = None
    fresh: bool = False
    timeout: float | None = None
    """Seconds for one item, from set-up to tear-down; None: `--world-timeout`."""
    group: bool = True
    """False if the test makes its default process group itself."""
    needs: tuple[str, ...] = tuple(NEEDS)
    """Needs of the test where the mark names no backend: on one that lacks any of them, it is skipped."""
    hosts: int | None = None
    """Over how many hosts to spread them; None: as few as they fit on."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that features have added, where they are given."""


def read_mark(node: pytest.Item | Any) -> RanksMark | None:
    """Return the nearest `ranks` mark of a node, validated, or None if it has none.

    Raises:
        MarkError: the mark's arguments make no sense; the message says which, and what to write.
    """
    mark = _nearest_mark(node)
    return None if mark is None else _parse(node, mark.args, mark.kwargs)


def size_of(item: pytest.Item, mark: RanksMark) -> int:
    """Return the size of an item of a mark; raise MarkError where none of its sizes was chosen."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if len(mark.sizes) == 1:
        if params.get("ranks_size") not in (None, *mark.sizes):
            raise MarkError(
                f"ranks({mark.sizes[0]}) on one parameter of a test whose own mark has several sizes: write "
                "the mark on each parameter, or on the test"
            )
        return mark.sizes[0]
    if params.get("ranks_size") not in mark.sizes:
        raise MarkError(
            f"ranks{mark.sizes}: several world sizes work only on a test function; give one size here"
        )
    return int(params["ranks_size"])


def _nearest_mark(node: pytest.Item | Any) -> pytest.Mark | None:
    """Return the nearest `ranks` mark of a node; that of a class comes before those of its bases.

    pytest's own `get_closest_marker` has the marks of a class in the order of definition, its bases' first.
    """
    # Of `pytest.param(..., marks=...)`, which pytest lists behind those of the function.
    of_parameter: Sequence[pytest.Mark] = getattr(getattr(node, "callspec", None), "marks", ())
    if of_parameter := [mark for mark in of_parameter if mark.name == "ranks"]:
        return of_parameter[-1]
    holder, mark = next(node.iter_markers_with_node("ranks"), (None, None))
    if isinstance(holder, pytest.Class):
        inherited = [_ranks_marks(cls) for cls in holder.obj.__mro__]
        if any(mark in marks for marks in inherited):  # a hook may have added it to the node alone
            return next(marks[0] for marks in inherited if marks)
    return mark


def _ranks_marks(cls: type) -> list[pytest.Mark]:
    given: Any = vars(cls).get("pytestmark", [])
    listed = given if isinstance(given, list | tuple) else [given]
    marks: list[Any] = [getattr(mark, "mark", mark) for mark in listed]  # a decorator has the mark itself
    return [mark for mark in marks if mark.name == "ranks"]


def _parse(node: pytest.Item | Any, sizes: tuple[Any, ...], given: Mapping[str, Any]) -> RanksMark:
    from lockstep.backends import check_backend, meets
    from lockstep.bounds import SECONDS, are_seconds, shown

    checks: dict[str, Callable[[RanksMark, Any], Any]] = {}
    if others := given.keys() - _OPTIONS:
        for added in reversed(node.config.hook.pytest_ranks_mark_options()):
            checks |= added
        if unknown := sorted(others - checks.keys()):
            has = ", ".join((*_OPTIONS[:-1], *checks, _OPTIONS[-1]))
            raise MarkError(f"ranks() has no option {unknown[0]!r}; it has {has}")
    _check_sizes(sizes)
    mark = RanksMark(sizes, **{name: value for name, value in given.items() if name not in others})
    mark.options.update({name: checks[name](mark, given[name]) for name in checks if name in others})
    if mark.backend is not None:
        try:
            check_backend(mark.backend)
        except ValueError as error:
            raise MarkError(str(error)) from None
    for name in ("fresh", "group"):
        if not isinstance(value := getattr(mark, name), bool):
            raise MarkError(f"ranks({name}={shown(value)}): {name} is True or False")
    if mark.backend is not None and not (mark.group or meets(mark.backend)):
        remedy = f"leave out backend={mark.backend!r}"
        raise MarkError(f"ranks(group=False): a {mark.backend} world always has its group; {remedy}")
    if mark.timeout is not None and not are_seconds(mark.timeout):
        raise MarkError(f"ranks(timeout={shown(mark.timeout)}): a timeout is {SECONDS}")
    are_words = isinstance(mark.needs, tuple | list) and all(isinstance(each, str) for each in mark.needs)
    if not are_words or not set(mark.needs) <= NEEDS.keys():
        raise MarkError(f"ranks(needs={shown(mark.needs)}): needs is a tuple of words of: {', '.join(NEEDS)}")
    return mark


def _check_sizes(sizes: tuple[Any, ...]) -> None:
    from lockstep.bounds import MOST_RANKS, is_whole, shown

    if not sizes:
        raise MarkError("ranks() needs at least one world size: write ranks(2), or ranks(2, 4) for two items")
    for size in sizes:
        if not is_whole(size):
            meant = ", ".join(_sizes_meant(sizes)) or "2"
            raise MarkError(f"ranks({shown(size)}): a world size is a whole number: write ranks({meant})")
        if not 1 <= size <= MOST_RANKS:
            raise MarkError(f"ranks({shown(size)}): a world has 1 to {MOST_RANKS} ranks")
    if len(set(sizes)) != len(sizes):
        raise MarkError(f"ranks{sizes}: a world size is given twice")


def _sizes_meant(sizes: tuple[Any, ...]) -> list[str]:
    """Return the sizes of worlds among the arguments of a mark, those in lists and strings too."""
    from lockstep.bounds import MOST_RANKS, shown

    values = [each for size in sizes for each in (size if isinstance(size, list | tuple) else [size])]
    texts = [each if isinstance(each, str) else shown(each) for each in values]
    found = [match[1] for text in texts if (match := re.fullmatch(r"([1-9][0-9]{0,6})(\.0)?", text))]
    return [size for size in dict.fromkeys(found) if int(size) <= MOST_RANKS]


_OPTIONS = tuple(each.name for each in fields(RanksMark)[1:-1])
