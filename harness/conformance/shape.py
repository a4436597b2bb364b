"""The shape of a table in JSON, checked as a whole when it is read. Must not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.conformance.table import Outcome

MOST_SECONDS = 1e12
"""More than any run takes; whole numbers beyond the range of a float have no seconds either."""

Check = Callable[[Any, str], None]
"""Raises WrongShape for a value, which the second argument names: "claims[3].title"."""

_NAMES: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class WrongShape(ValueError):
    """A value that no table has there; the message names the place, the value and what belongs there."""


def check_shape(content: Any) -> None:
    """Check that what was read as JSON is a table of format 1.

    Raises:
        WrongShape: it is not; about the first place where it is wrong.
    """
    _TABLE(content, "")
    _check_unique([*content["engines"]], "engines")
    _check_unique([claim["id"] for claim in content["claims"]], "the ids of claims")
    for number, claim in enumerate(content["claims"]):
        if unknown := [name for name in claim["engines"] if name not in content["engines"]]:
            raise WrongShape(
                f"claims[{number}].engines has {_short(unknown[0])}, which the table's engines do not have"
            )


def _check_unique(names: list[str], what: str) -> None:
    name, times = next(iter(Counter(names).most_common(1)), ("", 1))
    if times > 1:
        raise WrongShape(f"{what} have {_short(name)} {times} times")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(value, where, "a text")


def _seconds(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS:
        raise _wrong(value, where, "a number of seconds")


def _count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SECONDS:
        raise _wrong(value, where, "a count")


def _outcome(value: Any, where: str) -> None:
    if value not in [outcome.value for outcome in Outcome]:
        raise _wrong(value, where, f"one of {', '.join(outcome.value for outcome in Outcome)}")


def _list_of(check: Check) -> Check:
    def check_list(value: Any, where: str) -> None:
        if not isinstance(value, list):
            raise _wrong(value, where, "a list")
        for number, item in enumerate(value):
            check(item, f"{where}[{number}]")

    return check_list


def _object_of(check: Check) -> Check:
    """Return the check of an object of any names, with values of one kind."""

    def check_object(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        for name, item in value.items():
            check(item, f"{where}[{_short(name)}]")

    return check_object


def _record(checks: Mapping[str, Check], optional: Mapping[str, Check]) -> Check:
    """Return the check of an object with these names and no others."""
    known = {**checks, **optional}

    def check_record(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, where, "an object")
        if missing := [name for name in checks if name not in value]:
            raise WrongShape(f"{where or 'the table'} has no {missing[0]!r}")
        if unknown := [name for name in value if name not in known]:
            raise WrongShape(
                f"{where or 'the table'} has {_short(unknown[0])}; it can have {', '.join(known)}"
            )
        for name, item in value.items():
            known[name](item, f"{where}.{name}".lstrip("."))

    return check_record


def _wrong(value: Any, where: str, wanted: str) -> WrongShape:
    found = _NAMES.get(type(value), type(value).__name__)
    shown = "" if isinstance(value, dict | list) or value is None else f", {_short(value)}"
    return WrongShape(f"{where or 'the table'} is {found}{shown}, and not {wanted}")


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) > MOST_SECONDS:  # Python writes no more than 4,300 digits
        return "one of more than 12 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_CASE = _record({"name": _text, "outcome": _outcome}, {"reason": _text, "text": _text})
_CELL = _record({"seconds": _seconds, "cases": _list_of(_CASE)}, {"outcome": _outcome})
_CLAIM = _record({"id": _text, "title": _text, "engines": _object_of(_CELL)}, {})
_RUN = _record(
    {
        "when": _text,
        "seconds": _seconds,
        "arguments": _list_of(_text),
        "versions": _object_of(_text),
        "ended": _text,
        "deselected": _list_of(_text),
    },
    {},
)
_TABLE = _record(
    {
        "format": lambda value, where: None,
        "engines": _list_of(_text),
        "claims": _list_of(_CLAIM),
        "runs": _list_of(_RUN),
    },
    {"warnings": _object_of(_object_of(_count))},
)
