"""The lines about goldens at the end of a run: which were written, and which no test has used.

Runs in the controller; must not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest


def lines(
    config: pytest.Config, stats: Mapping[str, list[object]], used: Collection[str], written: Collection[str]
) -> Iterator[str]:
    """Yield what to say of the goldens that tests have used, and of those beside them.

    Args:
        stats: the reports of the run by kind.
        used: paths.
        written: those of them that this run has written.
    """
    if config.getoption("update_goldens"):
        counts = {"written": len(written), "up to date": len(used) - len(written)}
        yield f"goldens: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}"
    for path in _unused(config, stats, {Path(each) for each in used}):
        where = os.path.relpath(path, config.invocation_params.dir)
        yield f"golden that no test has used: {where}; remove it"


def _unused(config: pytest.Config, stats: Mapping[str, list[object]], used: set[Path]) -> list[Path]:
    """Return the files beside those that were used; nothing unless all tests ran and passed."""
    option = config.option
    selects = any(getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect"))
    partial = any(stats.get(kind) for kind in ("failed", "error", "skipped", "deselected", "xfailed"))
    if selects or partial or any("::" in str(arg) for arg in config.args):
        return []
    found = [
        path for folder in sorted({path.parent for path in used}) for path in sorted(folder.glob("*.txt"))
    ]
    backends = {path.stem.rpartition("-")[2] for path in used}
    return [path for path in found if path not in used and path.stem.rpartition("-")[2] in backends]
