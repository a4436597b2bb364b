"""Private names of pytest that the import of plugins uses. Seen in pytest 9.2."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence

import pytest
from _pytest.assertion import install_importhook


def import_with_rewritten_asserts(modules: Sequence[str]) -> None:
    """Import modules of plugins as a session of pytest would: their packages' asserts say what they compared.

    If it moves: what `Config._consider_importhook` installs, and what it gives the names of plugins to.
    """
    config = pytest.Config(pytest.PytestPluginManager())
    config.pluginmanager.import_plugin("assertion")  # its ini option is read when a file is rewritten
    rewriting = install_importhook(config)
    try:
        rewriting._must_rewrite.update(name.partition(".")[0] for name in modules)
        for name in modules:
            with contextlib.suppress(ImportError):  # an older release may not have the module
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(rewriting)
