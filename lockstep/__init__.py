"""Lockstep by a name of its own: `from lockstep.assertions import ...` where `harness` is another package.

`lockstep.shm` is `harness.shm`, the same module; see `lockstep.names`. Must not import torch.

PYTEST_DONT_REWRITE: it has no asserts, and may be imported before pytest starts.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lockstep import names

pytest_plugins = ["lockstep.pytest_plugin"]  # of `-p lockstep` where its entry point is not installed

if not any(isinstance(finder, names.OtherNames) for finder in sys.meta_path):
    sys.meta_path.insert(0, names.OtherNames())


def __getattr__(name: str) -> Any:
    if name == "__path__":
        raise AttributeError(name)
    home = "harness" if names.package() == "harness" else f"lockstep.{names.PACKAGE}"
    return getattr(importlib.import_module(home), name)
