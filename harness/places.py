"""Whose code a file is: the user's, or that of Python, an installed package or this harness.

Used on both sides; standard library only.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

_OTHERS = ("<", str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to an installed package, to Python or to this harness."""
    return "/site-packages/" in filename or "/dist-packages/" in filename or filename.startswith(_OTHERS)
