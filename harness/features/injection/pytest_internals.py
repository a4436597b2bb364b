"""The private names of pytest that disturbances use, seen in pytest 9.0 to 9.2."""

from __future__ import annotations

from typing import Any

import pytest


def fixture_value(item: pytest.Function, name: str) -> Any:
    """Return the value of a fixture, which is set up if the item has not requested it.

    If it moves: what the fixture `request` of a function is.
    """
    return item._request.getfixturevalue(name)
