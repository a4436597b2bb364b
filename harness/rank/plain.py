"""The form in which a report's data leaves a rank."""

from __future__ import annotations

from typing import Any

from harness.output import MAX_MESSAGE, truncate, truncate_lines

_AS_THEY_ARE = frozenset({bool, int, float, type(None)})
_CRASH = {"path", "lineno", "message"}


def plain(value: Any) -> Any:
    """Reduce a value to what can be sent and reads the same without the rank's modules: a tensor to its text.

    Reports hold anything: recorded properties, and what users' hooks set as attributes. What is too long to
    be read is cut.
    """
    kind = type(value)  # most values are simple, and this runs for each of every report
    if kind is str:
        return truncate(value)
    if kind in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        return _plain_dict(value)
    if isinstance(value, list | tuple):
        return _plain_list(value)
    return truncate(str(value))


def _plain_dict(value: dict[Any, Any]) -> dict[str, Any]:
    found = {str(name): plain(item) for name, item in value.items()}
    if found.keys() == _CRASH:
        found["message"] = truncate(str(found["message"]), MAX_MESSAGE)
    return found


def _plain_list(value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if value and all(type(item) is str for item in value):
        return truncate_lines([truncate(line, MAX_MESSAGE) for line in value])
    return list(map(plain, value))
