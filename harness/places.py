"""Whose code a file is: the user's, or that of Python, an installed package or this harness.

Used on both sides; standard library only.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

_OTHERS = ("<", str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep)
_FAULTHANDLERS_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to this harness."""
    return "/site-packages/" in filename or "/dist-packages/" in filename or filename.startswith(_OTHERS)


def users_line_of_dump(text: str, base: str) -> str:
    """Return `file:line in function` of the first line in faulthandler's dump that is the user's, "" if none.

    Args:
        base: directory that files are named from.
    """
    for filename, line, function in _FAULTHANDLERS_LINE.findall(text):
        if not is_installed(filename):
            return f"{filename.removeprefix(f'{base}/')}:{line} in {function}"
    return ""
