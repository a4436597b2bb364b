"""Compiled code under schedules of delays: it runs uncompiled, races are found, later tests compile."""

from __future__ import annotations

from pathlib import Path

import pytest

from suites.selftest.project import WITHOUT_PLUGINS, Run, line_of, run_pytest

PROJECT = "compiles"
OPTIONS = ("test_skew.py", "-p", "no:cacheprovider")


def test_without_a_schedule_all_pass(run: Run) -> None:
    """Those after a test with the mark, too: what torch has met there it compiles again."""
    assert run.count().startswith("4 passed"), run.output


@pytest.fixture(scope="module")
def skewed(run: Run) -> Run:
    options = (*OPTIONS, "--skew=2", "-k", "sound or race")
    return run_pytest(Path(run.path), *options, **WITHOUT_PLUGINS)


def test_a_compiled_model_trains_under_a_schedule(skewed: Run) -> None:
    assert skewed.outcome("test_sound") == "passed", skewed.failure("test_sound")


def test_a_race_with_a_compiled_block_is_found(skewed: Run) -> None:
    begun, read = (
        f"test_skew.py:{line_of(code, skewed.path / 'test_skew.py')}"
        for code in ("async_op=True", "# too early")
    )
    text = skewed.failure("test_race")
    assert f"begun at {begun}, was not waited for before `aten.mm` read its output at {read}" in text
