"""Layouts of plans that are compiled."""

from __future__ import annotations

from suites.selftest.project import Run

PROJECT = "layouts"
OPTIONS = ("test_compiled.py",)
INI = "pythonpath = ."


def test_a_right_plan_holds_and_is_compiled_once(run: Run) -> None:
    assert run.outcome("test_right[dp2]") == "passed", run.output


def test_a_reduction_that_is_missing_is_named(run: Run) -> None:
    text = run.failure("test_without_reduction[dp2]")
    assert (
        "gradient of `0.weight` equals the reference after a sum over dp: that reduction is missing" in text
    )
