"""Plugins of others that a server imports for its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.features.other_plugins.pytest_internals import import_with_rewritten_asserts


def test_asserts_are_rewritten_where_no_file_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "a_plugin.py").write_text("def fail(value):\n    assert value == 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    import_with_rewritten_asserts(["a_plugin", "a_plugin.of_a_newer_release"])
    plugin = sys.modules.pop("a_plugin")
    assert sys.meta_path == finders
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        plugin.fail(1)
