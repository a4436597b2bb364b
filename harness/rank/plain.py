"""The form in which a report's data leaves a rank."""

from __future__ import annotations

from typing import Any

from harness.cut import MOST_OF_A_MESSAGE, cut, cut_lines


def plain(value: Any) -> Any:
    """Reduce a value to what can be sent and reads the same without the rank's modules: a tensor to its text.

    Reports hold anything: recorded properties, and what users' hooks set as attributes. What is too long to
    be read is cut.
    """
    match value:
        case {"path": path, "lineno": lineno, "message": str(message)} if len(value) == 3:  # of a crash
            return {"path": path, "lineno": lineno, "message": cut(message, MOST_OF_A_MESSAGE)}
        case dict():
            return {str(name): plain(item) for name, item in value.items()}
        case list() if all(type(item) is str for item in value):
            return cut_lines([cut(line, MOST_OF_A_MESSAGE) for line in value])
        case list() | tuple():
            return (list if isinstance(value, list) else tuple)(map(plain, value))
        case None | bool() | int() | float() if type(value) in (bool, int, float, type(None)):
            return value
        case _:
            return cut(value if type(value) is str else str(value))
