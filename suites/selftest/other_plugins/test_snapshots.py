"""Plugins that write files or figures: on ranks they compare, or the test is refused with a sentence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from suites.selftest.project import Project


def test_inline_snapshots_are_compared_and_not_written(
    project: Project, plugin_path: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of this process; it refuses to write under -n
    project.copy("snapshots")
    before = (project.path / "test_inline.py").read_text()
    output = project.run(
        "-p",
        "inline_snapshot.pytest_plugin",
        "--inline-snapshot=create,fix",
        "test_inline.py",
        environ=plugin_path,
    )
    assert re.search("FAILED test_inline.py::test_another_value - rank [01]: assert 2 == 3", output)
    assert "2 passed" in output
    assert "inline-snapshot: snapshots in tests on ranks were compared, and not written" in output
    # That of the test without ranks is.
    assert (project.path / "test_inline.py").read_text() == before.replace("snapshot()", "snapshot(5)")


def test_syrupy_is_refused_on_ranks(project: Project, plugin_path: dict[str, str]) -> None:
    project.copy("snapshots")
    output = project.run("-p", "syrupy", "--snapshot-update", "test_syrupy.py", environ=plugin_path)
    assert "the fixture `snapshot` of syrupy does not work on ranks: " in output
    assert "1 passed" in output
    assert "1 error" in output
    written = (project.path / "__snapshots__" / "test_syrupy.ambr").read_text()
    assert "test_plain" in written
    assert "test_on_ranks" not in written


@pytest.mark.parametrize(
    ("option", "count"),
    [("--benchmark-min-rounds=2", "1 passed, 1 error"), ("--benchmark-disable", "2 passed")],
)
def test_a_benchmark_is_refused_on_ranks_or_runs_once(
    project: Project, plugin_path: dict[str, str], option: str, count: str
) -> None:
    project.copy("snapshots")
    output = project.run("-p", "pytest_benchmark.plugin", option, "test_benchmark.py", environ=plugin_path)
    refused = "the fixture `benchmark` of pytest-benchmark does not work on ranks: " in output
    assert refused == ("1 error" in count)
    assert count in output


def test_regressions_compare_each_rank_with_one_file(project: Project, plugin_path: dict[str, str]) -> None:
    project.copy("snapshots")
    plugins = ("-p", "pytest_datadir.plugin", "-p", "pytest_regressions.plugin")
    (project.path / "test_regressions").mkdir()
    (project.path / "test_regressions" / "test_equal.yml").write_text("size: 2\n")
    (project.path / "test_regressions" / "test_different.yml").write_text("rank: 0\n")
    output = project.run(*plugins, "test_regressions.py", environ=plugin_path)
    assert "1 failed, 1 passed" in output
    assert "rank 1 of 2 failed" in output
