"""An engine that offers shards and mixed precision, and no look inside: what the suites ask it, and find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.conformance.stored import load
from harness.conformance.table import Outcome, Table

PROJECT = Path(__file__).parents[3]


def run(directory: Path, engines: list[str], *claims: str) -> Table:
    """Hold engines of `plain_engine.py` to claims of the suites."""
    arguments = [f"--engine=plain_engine:{name}" for name in engines]
    arguments += [str(PROJECT / "suites" / claim) for claim in claims]
    command = [sys.executable, "-m", "harness", "conformance", *arguments, "--assert=plain"]
    path = os.pathsep.join(map(str, (PROJECT, Path(__file__).parent)))
    environ = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    assert "cases held" in done.stdout, done.stdout + done.stderr
    return load(directory / "conformance-report" / "conformance.json")


def test_warnings_of_a_foreign_engine_are_listed_and_fail_nothing(tmp_path: Path) -> None:
    claim = "core/test_reduction.py::test_sparse_gradients_are_reduced_like_dense_ones"
    table = run(tmp_path, ["Warns"], claim)
    outcomes = {cell.outcome for cells in table.cells.values() for cell in cells.values()}
    assert outcomes == {Outcome.HELD, Outcome.NOT_OFFERED}  # of replicas
    warnings = table.warnings["plain_engine:Warns"]
    assert warnings["FutureWarning: old_name is deprecated"] == 3  # tests: a strategy each
    markdown = (tmp_path / "conformance-report" / "conformance.md").read_text()
    assert "\n* plain\\_engine:Warns, 3: FutureWarning: old\\_name is deprecated\n" in markdown
    page = (tmp_path / "conformance-report" / "conformance.html").read_text()
    assert page.count("old_name is deprecated") == 1
