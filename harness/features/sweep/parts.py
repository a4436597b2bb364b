"""Parts of a sweep, one for each worker of pytest-xdist: items with other ids. Used on both sides."""

from __future__ import annotations

import re

_PART = re.compile(r"(?<=\[)part-\d+-of-\d+-|-?part-\d+-of-\d+")


def id_of_part(number: int, parts: int) -> str:
    """Return the id of a part, which is counted from 0."""
    return f"part-{number + 1}-of-{parts}"


def without_part(nodeid: str) -> str:
    """Return the node id of the whole sweep."""
    return _PART.sub("", nodeid).replace("[]", "")
